"""Dead-code elimination."""

import operator

import torch
import torch.fx

from titan.graph.ir.step_graph import StepGraph


def dead_code(graph: StepGraph) -> StepGraph:
    """Removes ops whose results nobody uses, also in loops, whose unused results and inputs go with them.

    Every op of the dialect is free of side effects; inputs of the step, and what a loop carries, are kept.
    """
    graph = graph.copy()
    remove_unused(graph.module)
    return graph


def remove_unused(module: torch.fx.GraphModule) -> None:
    """The same for one module, in place."""
    for node in reversed(module.graph.nodes):
        if node.target is torch.ops.higher_order.scan and node.users:
            _prune_loop(module, node)
        if node.op in ("call_function", "get_attr") and not node.users:
            module.graph.erase_node(node)


def _prune_loop(module: torch.fx.GraphModule, scan: torch.fx.Node) -> None:
    body = operator.attrgetter(scan.args[0].target)(module)
    _, init, stacks, shared = scan.args
    output = body.graph.output_node()
    for result in list(scan.users):
        if not result.users:
            module.graph.erase_node(result)
    used = {result.args[1] for result in scan.users}
    kept = [index for index in range(len(output.args[0])) if index < len(init) or index in used]
    for result in list(scan.users):
        result.update_arg(1, kept.index(result.args[1]))
    output.args = (tuple(output.args[0][index] for index in kept),)
    scan.meta["val"] = tuple(scan.meta["val"][index] for index in kept)
    remove_unused(body)
    inputs = body.graph.find_nodes(op="placeholder")[len(init) :]
    used = [bool(node.users) for node in inputs]
    if not any(used[: len(stacks)]):
        used[0] = True  # it gives the loop its length
    for node, is_used in zip(inputs, used, strict=True):
        if not is_used:
            body.graph.erase_node(node)
    scan.args = (
        scan.args[0],
        init,
        [stack for stack, is_used in zip(stacks, used[: len(stacks)], strict=True) if is_used],
        tuple(tensor for tensor, is_used in zip(shared, used[len(stacks) :], strict=True) if is_used),
    )
