"""Common-subexpression elimination."""

from collections.abc import Hashable

import torch
import torch.fx

from titan.graph.ir.dialect import argument_key, draws_random_numbers, graphs_of, group_argument, op_name
from titan.graph.ir.step_graph import StepGraph


def common_subexpressions(graph: StepGraph) -> StepGraph:
    """Keeps the first of several ops that compute the same value from the same inputs.

    Collectives are left alone: gathering a weight once more instead of holding it is a choice of memory policy.
    """
    graph = graph.copy()
    for fx_graph in graphs_of(graph.module):
        merge_equal(fx_graph)
    return graph


def merge_equal(fx_graph: torch.fx.Graph) -> None:
    """The same for one graph, in place."""
    first: dict[Hashable, torch.fx.Node] = {}
    for node in list(fx_graph.nodes):
        if node.op != "call_function" or not _may_merge(node):
            continue
        kept = first.setdefault((node.target, argument_key(node.args), argument_key(node.kwargs)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            fx_graph.erase_node(node)


def _may_merge(node: torch.fx.Node) -> bool:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    is_collective = group_argument(node) is not None and not op_name(node.target).startswith("titan.axis_index")
    return not is_collective and not draws_random_numbers(node)
