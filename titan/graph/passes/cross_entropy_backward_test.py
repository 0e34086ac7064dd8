"""The rewritten backward of cross-entropy is the gradient, sums over no classes, and is left out where wrong."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx.experimental.proxy_tensor import make_fx

from titan.graph.ir.step_graph import StepGraph
from titan.graph.passes.cross_entropy_backward import cross_entropy_backward
from titan.parallel.mesh import MeshSpec

aten = torch.ops.aten


def _graph(reduction, num_tokens=12, num_classes=20):
    def gradient(logits, labels, denominator):
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction=reduction).sum() / denominator
        return torch.autograd.grad(loss, logits)

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, num_classes, generator=generator).mul_(5).requires_grad_()
    labels = torch.randint(num_classes, (num_tokens,), generator=generator)
    labels[3:6] = -100
    inputs = (logits, labels, torch.tensor(7.3))
    module = make_fx(gradient, tracing_mode="fake")(*inputs)
    for node in module.graph.nodes:
        node.meta |= {"region": "backward", "module_fqn": "loss", "source": ""}
    return StepGraph(module, MeshSpec((), ()), {}, {}, {}, False), inputs


def _targets(graph):
    return [node.target for node in graph.module.graph.nodes]


def test_is_the_gradient_without_a_sum_over_classes():
    graph, inputs = _graph("sum")
    rewritten = cross_entropy_backward(graph)
    assert aten._log_softmax_backward_data.default in _targets(graph)
    assert aten._log_softmax_backward_data.default not in _targets(rewritten)
    (gradient,), (expected,) = rewritten.module(*inputs), graph.module(*inputs)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)
    assert gradient[3:6].abs().max() == 0 and gradient[0].abs().max() > 1e-3
    new = set(_targets(rewritten)) - set(_targets(graph))
    assert new and not any("sum" in target.name() for target in new)
    for node in rewritten.module.graph.find_nodes(op="call_function", target=aten.sub.Tensor):
        assert node.meta["module_fqn"] == "loss" and node.meta["val"].shape == (12, 20)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_leaves_other_losses_alone(reduction):
    graph, _ = _graph(reduction)
    assert _targets(cross_entropy_backward(graph)) == _targets(graph)
