"""Tensor parallelism in training: every family split over devices, alone and with FSDP and HSDP, equals one device."""

import collections
import dataclasses

import pytest

from titan.core.config.validate import ConfigError
from titan.graph.ir.dialect import op_name
from titan.parallel.mesh import MeshSpec
from titan.train.config.kernels import FusedLinearCrossEntropyConfig
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.training import TrainingConfig
from titan.train.testing.case import ONE, Case
from titan.train.testing.executed import evaluate_xla, run_xla
from titan.train.testing.graphs import assert_one_program, graph_of
from titan.train.testing.grid import grid
from titan.train.testing.models import LENGTH
from titan.train.testing.outcome import assert_same

TP2, TP4 = MeshSpec(("tp",), (2,)), MeshSpec(("tp",), (4,))
FSDP_TP2, FSDP_TP4 = MeshSpec(("dp_shard", "tp"), (2, 2)), MeshSpec(("dp_shard", "tp"), (2, 4))
HSDP_TP2 = MeshSpec(("dp_replicate", "dp_shard", "tp"), (2, 2, 2))
TOLERANCE = 1e-5  # of the largest value: float32 sums in another order

CASES = {
    "llama3_hsdp4_tp2_scan": Case("llama3_shared", HSDP_TP2, scan=True),
    "llama3_tp4_whole_tokens": Case("llama3_shared", TP4, sequence_parallel=False),
    "tied_fsdp2_tp2": Case("qwen3_shared", FSDP_TP2),
    "tied_fsdp2_tp4_kernels": Case("qwen3_shared", FSDP_TP4, kernels=True, fused_loss="xla"),
    "moe_fsdp2_tp4": Case("qwen3_moe_shared", FSDP_TP4),
    "moe_tp4_whole_tokens_kernels": Case("qwen3_moe_shared", TP4, sequence_parallel=False, scan=True, kernels=True),
    "muse_fsdp2_tp2": Case("muse_glimmer_shared", FSDP_TP2, memory_policy="full"),
    # Two devices for each head of keys and values.
    "few_muse_tp4_whole_tokens_scan": Case("muse_glimmer_few", TP4, sequence_parallel=False, scan=True),
    "few_muse_fsdp2_tp4_recompute": Case("muse_glimmer_few", FSDP_TP4, memory_policy="full"),
    "few_tp4": Case("qwen3_few", TP4),
    "few_moe_fsdp2_tp4_kernels": Case("qwen3_moe_few", FSDP_TP4, kernels=True),
    "muse_hsdp4_tp2_microbatches_fused": Case("muse_glimmer_shared", HSDP_TP2, microbatches=2, fused_loss="mosaic"),
}
_EXHAUSTIVE = (
    "tied_fsdp2_tp2",
    "moe_fsdp2_tp4",
    "moe_tp4_whole_tokens_kernels",
    "few_muse_tp4_whole_tokens_scan",
    "few_muse_fsdp2_tp4_recompute",
    "few_tp4",
    "muse_hsdp4_tp2_microbatches_fused",
)


@pytest.mark.parametrize("case", grid(CASES, _EXHAUSTIVE))
def test_devices_that_share_the_work_equal_one(case):
    assert_same(run_xla(case), run_xla(Case(case.model)), TOLERANCE)


@pytest.mark.parametrize("case", grid(CASES, CASES.keys() - {"few_moe_fsdp2_tp4_kernels"}))
def test_every_device_has_the_same_program(case):
    assert_one_program(case)


def test_an_evaluation_equals_that_of_one_device():
    split, one = (evaluate_xla(Case("muse_glimmer_shared", mesh)) for mesh in (FSDP_TP2, ONE))
    assert split == pytest.approx(one, rel=TOLERANCE)


@pytest.mark.parametrize("model", ["muse_glimmer_shared", "qwen3_moe_shared"])
def test_each_block_gathers_once_and_scatters_once(model):
    graph = graph_of(Case(model, TP2))
    counts = collections.Counter(
        (node.meta["region"], node.meta["module_fqn"], op_name(node.target).split(".")[1])
        for node in graph.module.graph.nodes
        if node.op == "call_function" and "tp" in node.args and op_name(node.target) != "titan.axis_index.default"
    )
    blocks = [f"layers.{index}.{block}" for index in range(2) for block in ("attention", "feed_forward")]
    gather, scatter = "all_gather_along", "reduce_scatter_along"
    # The backward of each is the other.
    expected = {
        (region, block, op): 1 for region in ("forward", "backward") for block in blocks for op in (gather, scatter)
    }
    expected[("forward", "embedding", scatter)] = expected[("backward", "embedding", gather)] = 1
    expected[("loss", "cross_entropy", gather)] = expected[("backward", "cross_entropy", scatter)] = 1
    expected[("loss", "cross_entropy", "all_reduce")] = 2
    activations = {key: count for key, count in counts.items() if key[1] in (*blocks, "embedding", "cross_entropy")}
    assert activations == expected
    # The rest are sums of gradients of whole weights, and of the squares of the gradients' norm.
    assert {op for region, module, op in set(counts) - set(activations)} == {"all_reduce"}


@pytest.mark.parametrize(
    "model, changes, message",
    [
        (
            "llama3_shared",
            {"tensor_parallel": 16},
            "--parallelism.tensor_parallel: 16 does not divide model.num_heads=8; give a divisor of it",
        ),
        (
            "muse_glimmer_shared",
            {"tensor_parallel": 6, "num_heads": 12, "vocab_size": 120},
            "--parallelism.tensor_parallel: 6 neither divides model.num_kv_heads=4 nor is a multiple of it; give a "
            "divisor or a multiple of it",
        ),
        (
            "qwen3_few",
            {"tensor_parallel": 6, "num_heads": 12, "vocab_size": 120},
            "--parallelism.tensor_parallel: 6 devices for model.num_kv_heads=2 are 3 for each, which do not divide its "
            "8 elements; give 2 times a divisor of 8",
        ),
        (
            "qwen3_moe_shared",
            {"tensor_parallel": 2, "expert_ffn_dim": 25},
            "--parallelism.tensor_parallel: 2 does not divide model.expert_ffn_dim=25; give a divisor of it",
        ),
        (
            "qwen3_shared",
            {"tensor_parallel": 2, "vocab_size": 121},
            "--parallelism.tensor_parallel: 2 does not divide model.vocab_size=121; give a divisor of it",
        ),
        (
            "llama3_shared",
            {"tensor_parallel": 2, "sequence_length": 15},
            "--training.sequence_length: 15 tokens cannot be split over tensor_parallel=2; give a multiple of 2, or "
            "--parallelism.sequence_parallel=false",
        ),
        (
            "llama3_shared",
            {"tensor_parallel": 4, "context_parallel": 2, "sequence_length": 20},
            "--training.sequence_length: 20 tokens cannot be split over tensor_parallel=4 x context_parallel=2; give a "
            "multiple of 8, ",
        ),
        (
            "llama3_shared",
            {"tensor_parallel": 2, "gradients": "forward"},
            "--fused_linear_cross_entropy.gradients: forward needs the logits of the whole vocabulary at once, which ",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(model, changes, message):
    changes = dict(changes)
    sizes = {name: changes.pop(name) for name in ("expert_ffn_dim", "num_heads", "vocab_size") if name in changes}
    length, gradients = changes.pop("sequence_length", LENGTH), changes.pop("gradients", "backward")
    config = Case(model).config
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **sizes),
        parallelism=ParallelismConfig(**changes),
        training=TrainingConfig(sequence_length=length),
        fused_linear_cross_entropy=FusedLinearCrossEntropyConfig(enable=True, gradients=gradients),
    )
    with pytest.raises(ConfigError) as error:
        config.validate()
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    # A split of the model alone is what is wrong.
    dataclasses.replace(config, parallelism=ParallelismConfig()).validate()
