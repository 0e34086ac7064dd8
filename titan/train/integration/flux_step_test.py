"""FLUX.1 in training: the step by XLA and on devices as by PyTorch, with kernels, loops, pieces and memory policies.

What the model is, is tested beside it; here, that the graph, its passes, the executors and the swaps lose none of it.
"""

import pytest
import torch

from titan.train.testing.case import HSDP, Case
from titan.train.testing.executed import run_torch, run_xla
from titan.train.testing.graphs import graph_of
from titan.train.testing.outcome import assert_same

# Of each value, and of a tensor's largest gradient. The embedders of time and guidance read cosines of angles up to
# 2000, of which XLA and PyTorch, in float32, agree to some 1e-4 alone; the loops within PyTorch have the same cosines.
_TOLERANCE = 1e-4
_LOOP_TOLERANCE = 1e-5
_RULES = "none,single_blocks.*=recompute,single_blocks.*::input=save,double_blocks.*.image.feed_forward=recompute"


@pytest.mark.parametrize(
    "case",
    [
        Case("flux_kernels", mesh=HSDP, scan=True, memory_policy="offload"),
        Case("flux_release", memory_policy=_RULES),
        Case("flux", split=True, memory_policy="full"),
    ],
    ids=["hsdp_scan_offload_kernels", "release_rules", "split_full"],
)
def test_training_by_xla_equals_that_by_pytorch(case):
    expected = run_torch(Case("flux"))
    assert_same(run_xla(case), expected, _TOLERANCE)
    assert expected.metrics[-1]["loss"] < expected.metrics[0]["loss"] - 1e-3
    assert expected.metrics[0]["num_tokens"] == 64  # 8 rows of 2 images of 4 patches: no text and no padding


def test_pytorch_runs_the_loops_too():
    assert_same(run_torch(Case("flux", scan=True)), run_torch(Case("flux")), _LOOP_TOLERANCE)


def test_a_policy_is_about_the_modules_that_it_names():
    """What is computed again for the backward pass are the feed-forwards of images and whole single blocks."""

    def num_products(policy, fqn):
        graph = graph_of(Case("flux", memory_policy=policy)).module.graph
        (*products,) = graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
        return sum(fqn in node.meta["module_fqn"] for node in products)

    assert num_products("none", "image.feed_forward") == num_products("none", "text.feed_forward") == 2
    assert num_products(_RULES, "image.feed_forward") == 4
    assert num_products(_RULES, "text.feed_forward") == 2
    assert (num_products("none", "single_blocks"), num_products(_RULES, "single_blocks")) == (2, 4)
