"""Common-subexpression elimination."""

from collections.abc import Hashable

import torch
import torch.fx

from titan.graph.passes.pipeline import copy_graph
from titan.graph.step_graph import StepGraph


def common_subexpressions(graph: StepGraph) -> StepGraph:
    """Keeps the first of several ops that compute the same value from the same inputs.

    Collectives are left alone: gathering a weight once more instead of holding it is a choice of memory policy.
    """
    graph = copy_graph(graph)
    first: dict[Hashable, torch.fx.Node] = {}
    for node in list(graph.module.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "namespace", "") == "_c10d_functional":
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        # A number's type counts: 1, 1.0 and True are equal in Python and different in promotion.
        key = (node.target, _key(node.args), _key(node.kwargs))
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.module.graph.erase_node(node)
    return graph


def _key(value: object) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(entry)) for name, entry in sorted(value.items()))
    if isinstance(value, float):
        return (float, value.hex())  # tells 0.0 from -0.0, and a NaN from no other NaN
    if isinstance(value, (bool, int)):
        return (type(value), value)
    return value
