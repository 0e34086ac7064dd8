"""The SPMD check: the graphs of two ranks must be one program."""

import torch
import torch.fx

from titan.graph.dialect import describe
from titan.graph.step_graph import StepGraph


class SpmdError(ValueError):
    """Two ranks captured different graphs, so that one program cannot serve all of them."""


def check_spmd(first: StepGraph, last: StepGraph) -> None:
    """Compares the captures of the first and the last rank, node by node: ops, arguments, shapes and constants.

    A rank's coordinate baked into the graph as a number or a constant tensor would be silently wrong on all other ranks;
    values that depend on the rank come from the op `titan::axis_index` alone.

    Raises:
      SpmdError: names the first node that differs, its module and source line, and how it differs.
    """
    nodes = [list(graph.module.graph.nodes) for graph in (first, last)]
    position: dict[torch.fx.Node, int] = {node: i for side in nodes for i, node in enumerate(side)}
    for a, b in zip(*nodes):
        if a.op != b.op or (a.op == "call_function" and a.target is not b.target):
            raise SpmdError(f"rank-dependent program: {describe(a)} on the first rank is {describe(b)} on the last")
        if a.op == "get_attr":
            _compare_constants(first, last, a, b)
            continue
        for x, y in ((a.args, b.args), (a.kwargs, b.kwargs)):
            if _positions(x, position) != _positions(y, position):
                raise SpmdError(
                    f"rank-dependent program: {describe(a)} has arguments {x} on the first rank and {y} on the last; "
                    "take values that depend on the rank from titan::axis_index"
                )
        if _shapes(a) != _shapes(b):
            raise SpmdError(
                f"rank-dependent shape: {describe(a)} gives {_shapes(a)} on the first rank and {_shapes(b)} on the last"
            )
    if len(nodes[0]) != len(nodes[1]):
        raise SpmdError(f"rank-dependent program: {len(nodes[0])} ops on the first rank, {len(nodes[1])} on the last")


def _compare_constants(first: StepGraph, last: StepGraph, a: torch.fx.Node, b: torch.fx.Node) -> None:
    x, y = (getattr(graph.module, node.target) for graph, node in ((first, a), (last, b)))
    if not isinstance(x, torch.Tensor):
        return
    if x.dtype != y.dtype or not torch.equal(x, y):
        users = ", ".join(describe(user) for user in a.users)
        raise SpmdError(
            f"rank-dependent constant {a.target}, used by {users}; take values that depend on the rank from titan::axis_index"
        )


def _positions(value: object, position: dict[torch.fx.Node, int]) -> object:
    if isinstance(value, torch.fx.Node):
        return ("node", position[value])
    if isinstance(value, (list, tuple)):
        return [_positions(entry, position) for entry in value]
    if isinstance(value, dict):
        return {name: _positions(entry, position) for name, entry in value.items()}
    return value


def _shapes(node: torch.fx.Node) -> object:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape))
    return [(entry.dtype, tuple(entry.shape)) for entry in value if isinstance(entry, torch.Tensor)] if isinstance(value, (list, tuple)) else None
