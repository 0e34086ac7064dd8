"""The loop over layers (PyTorch's `scan`), and what orders computation without computing anything."""

import functools
from collections.abc import Callable, Sequence

import jax
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
    """A loop over stacked entries as `jax.lax.scan`.

    Args:
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
