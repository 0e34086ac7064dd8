"""The loop over layers (PyTorch's `scan`), and what orders computation without computing anything."""

import functools
from collections.abc import Callable, Sequence

import jax
import torch
import torch.fx
from jax import lax

from titan.graph.lowering.table import LoweringContext, lowering


@lowering("higher_order.scan.default")
def _scan(
    ctx: LoweringContext,
    body: Callable[..., tuple[jax.Array, ...]],
    init: Sequence[jax.Array],
    stacks: Sequence[jax.Array],
    shared: Sequence[jax.Array],
    *,
    reverse: bool = False,
) -> tuple[jax.Array, ...]:
    """Args:
    body: the loop's body, lowered.
    reverse: from the last entry of the stacks to the first; results are stacked where the entries were.
    """

    def turn(carry: tuple[jax.Array, ...], entries: tuple[jax.Array, ...]):
        results = body(*carry, *entries, *shared)
        return results[: len(init)], results[len(init) :]

    carry, stacked = lax.scan(turn, tuple(init), tuple(stacks), reverse=reverse)
    return (*carry, *stacked)


reversed_scan = functools.partial(_scan, reverse=True)
"""The lowering of a scan whose flips around it are left out."""


@lowering("titan.barrier.default")
def _barrier(ctx: LoweringContext, tensors: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(lax.optimization_barrier(tuple(tensors)))


def find_reversed_scans(graph: torch.fx.Graph) -> tuple[set[torch.fx.Node], set[torch.fx.Node]]:
    """Scans that go from the last entry to the first, and the flips around them that say so.

    PyTorch's op knows one direction: a loop the other way has everything that it scans and stacks flipped. On a device
    each flip would be a copy of a whole stack, of parameters for one.

    Returns:
      The scans, and the flips that have no other purpose.
    """
    scans = {
        node
        for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
        if all(map(_is_flip, node.args[2])) and all(map(_is_flip, _stack_users(node)))
    }
    while True:
        before = {node: user for scan in scans for node in scan.args[2] for user in node.users}
        shared = {scan for scan in scans if any(user not in scans for node in scan.args[2] for user in node.users)}
        if not shared:
            return scans, {*before, *(user for scan in scans for user in _stack_users(scan))}
        scans -= shared


def _stack_users(scan: torch.fx.Node) -> list[torch.fx.Node]:
    num_carry = len(scan.args[1])
    return [user for result in scan.users if result.args[1] >= num_carry for user in result.users]


def _is_flip(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.flip.default and list(node.args[1]) == [0]
