"""Removal of ops that change nothing."""

from collections.abc import Callable

import torch
import torch.fx

from titan.graph.ir.dialect import graphs_of
from titan.graph.ir.step_graph import StepGraph

aten = torch.ops.aten


def no_ops(graph: StepGraph) -> StepGraph:
    """Replaces an op by its input where both are the same tensor, bit for bit and stride for stride.

    Aliases and copies (`detach`, `clone`, `_to_copy` to the same dtype), shape ops to the shape at hand, a
    transposition of a transposition, a view of a view, and a power of one, which autograd emits for squares.
    """
    graph = graph.copy()
    for fx_graph in graphs_of(graph.module):
        for node in list(fx_graph.nodes):
            if node.op == "call_function" and node.target in _RULES:
                _simplify(node)
    return graph


def _simplify(node: torch.fx.Node) -> None:
    if node.target is aten.view.default and _is_view(node.args[0]):
        node.update_arg(0, node.args[0].args[0])
    source = _RULES[node.target](node)
    if source is not None and _same_tensor(source, node):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)


def _same_tensor(a: torch.fx.Node, b: torch.fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.dtype == y.dtype and x.device == y.device and x.shape == y.shape and x.stride() == y.stride()


def _is_view(node: torch.fx.Node) -> bool:
    # Of a contiguous tensor there is a view of any shape, and its strides are those of the shape.
    return node.target is aten.view.default and node.args[0].meta["val"].is_contiguous()


def _input(node: torch.fx.Node) -> torch.fx.Node:
    return node.args[0]


def _double_transposition(node: torch.fx.Node) -> torch.fx.Node | None:
    inner = node.args[0]
    return inner.args[0] if inner.target is node.target and inner.args[1:] == node.args[1:] else None


def _power_of_one(node: torch.fx.Node) -> torch.fx.Node | None:
    return node.args[0] if node.args[1] == 1 else None


_RULES: dict[torch._ops.OpOverload, Callable[[torch.fx.Node], torch.fx.Node | None]] = {
    aten.alias.default: _input,
    aten.detach.default: _input,
    aten.lift_fresh_copy.default: _input,
    aten.clone.default: _input,
    aten._to_copy.default: _input,
    aten.view.default: _input,
    aten.reshape.default: _input,
    aten._unsafe_view.default: _input,
    aten.expand.default: _input,
    aten.slice.Tensor: _input,
    aten.t.default: _double_transposition,
    aten.transpose.int: _double_transposition,
    aten.pow.Tensor_Scalar: _power_of_one,
}
