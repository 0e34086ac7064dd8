"""Cross-entropy's backward without a sum over the classes."""

import torch
import torch.fx

from titan.graph.ir.step_graph import StepGraph

aten = torch.ops.aten

_SUM = 2  # the number of reduction="sum"


def cross_entropy_backward(graph: StepGraph) -> StepGraph:
    """Replaces the backward of log_softmax, where its input is the backward of nll_loss, by element-wise ops.

    The backward of log_softmax subtracts softmax times the sum of the incoming gradient over the classes. That gradient
    is zero but at the label, so its sum is the gradient at the label. Without the sum a compiler has no reason to write
    the [tokens, classes] one-hot gradient to memory: it is a comparison within one loop.

    Only 2-d inputs without class weights, reduced by a sum, are replaced. PyTorch itself gains nothing and rounds the
    exponential in its fused op otherwise, so this is for compilers.
    """
    graph = graph.copy()
    for node in list(graph.module.graph.find_nodes(op="call_function", target=aten._log_softmax_backward_data.default)):
        grad, output, _, input_dtype = node.args
        if not _is_summed_nll_backward(grad) or input_dtype != output.meta["val"].dtype:
            continue
        grad_loss, _, labels, _, _, ignore_index, _ = grad.args
        with graph.module.graph.inserting_before(node):
            at_label = _add(node, aten.neg.default, grad_loss)
            counted = _add(node, aten.ne.Scalar, labels, ignore_index)
            total = _add(node, aten.where.self, counted, at_label, _add(node, aten.zeros_like.default, at_label))
            softmax = _add(node, aten.exp.default, output)
            product = _add(node, aten.mul.Tensor, softmax, _add(node, aten.unsqueeze.default, total, 1))
            node.replace_all_uses_with(_add(node, aten.sub.Tensor, grad, product))
        graph.module.graph.erase_node(node)
    return graph


def _is_summed_nll_backward(node: torch.fx.Node) -> bool:
    if node.target is not aten.nll_loss_backward.default:
        return False
    _, scores, _, weight, reduction, _, _ = node.args
    return scores.meta["val"].ndim == 2 and weight is None and reduction == _SUM


def _add(origin: torch.fx.Node, op: torch._ops.OpOverload, *args: object) -> torch.fx.Node:
    """A new node with the metadata of the one that it helps to replace."""
    node = origin.graph.call_function(op, args)
    values = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args]
    node.meta = {**origin.meta, "val": op(*values)}
    return node
