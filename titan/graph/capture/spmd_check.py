"""The SPMD check: one program serves all ranks, and what is to be equal on all of them is."""

import operator
from collections.abc import Sequence

import torch
import torch.fx

from titan.graph.ir.dialect import EQUALISE, SCATTER, argument_key, describe, group_argument, op_name
from titan.graph.ir.step_graph import StepGraph
from titan.parallel.layout import TensorLayout

_CURE = "take values that depend on the rank from titan::axis_index"


class SpmdError(ValueError):
    """One program cannot serve all ranks, or leaves ranks with different values of what is to be equal."""


def check_spmd(first: StepGraph, last: StepGraph) -> None:
    """Holds that the first and the last rank captured one program, and that it keeps equal what is replicated.

    A rank's coordinate baked into the graph as a number or a constant tensor would be silently wrong on all other
    ranks; values that depend on the rank come from the op `titan::axis_index` alone. So the two captures are compared
    node by node: ops, arguments, shapes and constants.

    A metric or a piece of state that is laid out as replicated, but computed from what differs between ranks with no
    collective in between, has a reduction missing: its copies would drift apart without a sign. So the mesh axes along
    which values may differ are followed from inputs to outputs, and through loops until nothing new comes around.

    Raises:
      SpmdError: names the first node that differs, its module and source line, and how it differs; or the output, the
        axis and the op that computes it.
    """
    _compare(first.module, last.module)
    _check_replication(first)


def _compare(first: torch.fx.GraphModule, last: torch.fx.GraphModule) -> None:
    nodes = [list(module.graph.nodes) for module in (first, last)]
    counterpart = dict(zip(nodes[1], nodes[0], strict=False))
    # Where one graph is longer, the other's output meets another op.
    for a, b in zip(*nodes, strict=False):
        if a.op != b.op or (a.op == "call_function" and a.target is not b.target):
            raise SpmdError(
                f"rank-dependent program: {describe(a)} on the first rank is {describe(b)} on the last; {_CURE}"
            )
        if a.op == "get_attr":
            _compare_constants(first, last, a, b)
            continue
        mapped = torch.fx.map_arg((b.args, b.kwargs), counterpart.__getitem__)
        if argument_key((a.args, a.kwargs)) != argument_key(mapped):
            raise SpmdError(
                f"rank-dependent program: {describe(a)} has arguments {_arguments(a)} on the first rank and "
                f"{_arguments(b)} on the last; {_CURE}"
            )
        if _shapes(a) != _shapes(b):
            raise SpmdError(
                f"rank-dependent shape: {describe(a)} gives {_shapes(a)} on the first rank and {_shapes(b)} on the "
                "last; shapes must be equal on all ranks"
            )
    if len(nodes[0]) != len(nodes[1]):
        raise SpmdError(f"rank-dependent program: {len(nodes[0])} nodes on the first rank, {len(nodes[1])} on the last")


def _compare_constants(
    first: torch.fx.GraphModule, last: torch.fx.GraphModule, a: torch.fx.Node, b: torch.fx.Node
) -> None:
    x, y = operator.attrgetter(a.target)(first), operator.attrgetter(b.target)(last)
    if isinstance(x, torch.fx.GraphModule):
        _compare(x, y)
    elif x.dtype != y.dtype or x.shape != y.shape or not torch.equal(_bytes(x), _bytes(y)):
        users = ", ".join(describe(user) for user in a.users)
        raise SpmdError(f"rank-dependent constant {a.target}, used by {users}; {_CURE}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # tells 0.0 from -0.0 and takes a NaN for itself


def _arguments(node: torch.fx.Node) -> str:
    return ", ".join([*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())])


def _shapes(node: torch.fx.Node) -> object:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [(entry.dtype, tuple(entry.shape)) for entry in values if isinstance(entry, torch.Tensor)]


def _check_replication(graph: StepGraph) -> None:
    inputs = [_sharded_axes(layout, graph) for layout in (*graph.state.values(), *graph.batch.values())]
    varying = _follow(graph.module, inputs)
    outputs = [*(graph.state.items() if graph.updates_state else ()), *graph.metrics.items()]
    for (name, layout), node in zip(outputs, graph.module.graph.output_node().args[0], strict=True):
        for axis in sorted(varying[node] - _sharded_axes(layout, graph)):
            raise SpmdError(
                f"{name} is to be equal along mesh axis {axis} and may differ: {describe(node)} computes it from "
                f"values that no collective over {axis} has made equal"
            )


_Axes = frozenset[str]


def _follow(module: torch.fx.GraphModule, inputs: Sequence[_Axes]) -> dict[torch.fx.Node, _Axes]:
    """For each node the mesh axes along which its value may differ, given those of the graph's inputs."""
    remaining = iter(inputs)
    varying: dict[torch.fx.Node, _Axes] = {}
    loops: dict[torch.fx.Node, list[_Axes]] = {}
    for node in module.graph.nodes:
        varying[node] = frozenset()
        if node.op == "placeholder":
            varying[node] = next(remaining)
        elif node.target is torch.ops.higher_order.scan:
            loops[node] = _around(module, node, varying)
        elif node.target is operator.getitem and node.args[0] in loops:
            varying[node] = loops[node.args[0]][node.args[1]]
        elif node.op == "call_function":
            varying[node] = _after(node, frozenset().union(*(varying[used] for used in node.all_input_nodes)))
    return varying


def _around(module: torch.fx.GraphModule, loop: torch.fx.Node, varying: dict[torch.fx.Node, _Axes]) -> list[_Axes]:
    """The same for the results of a loop."""
    body = operator.attrgetter(loop.args[0].target)(module)
    carry, stacks, shared = ([varying[node] for node in nodes] for nodes in loop.args[1:])
    while True:
        inside = _follow(body, [*carry, *stacks, *shared])
        results = [inside[node] for node in body.graph.output_node().args[0]]
        wider = [before | after for before, after in zip(carry, results[: len(carry)], strict=True)]
        if wider == carry:
            return results
        carry = wider


def _after(node: torch.fx.Node, varying: frozenset[str]) -> frozenset[str]:
    position = group_argument(node)
    if position is None:
        return varying
    name = op_name(node.target).split(".")[1].removesuffix("_coalesced")
    if name in EQUALISE:
        return varying - {node.args[position]}
    if name in SCATTER:
        return varying | {node.args[position]}
    raise SpmdError(f"{describe(node)}: it is not known whether its result is equal along {node.args[position]}")


def _sharded_axes(layout: TensorLayout, graph: StepGraph) -> frozenset[str]:
    return frozenset(name for names in layout.axes_by_dim(graph.mesh) for name in names)
