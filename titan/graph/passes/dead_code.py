"""Dead-code elimination."""

from titan.graph.step_graph import StepGraph


def dead_code(graph: StepGraph) -> StepGraph:
    """Removes ops whose results nobody uses. Every op of the dialect is free of side effects; inputs are kept."""
    graph = graph.copy()
    fx_graph = graph.module.graph
    for node in reversed(fx_graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            fx_graph.erase_node(node)
    return graph
