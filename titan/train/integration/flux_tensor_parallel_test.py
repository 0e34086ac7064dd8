"""Tensor parallelism of FLUX.1: layers split over devices, alone and with FSDP and HSDP, equal one device."""

import collections

import pytest

from titan.core.config.flags import parse
from titan.core.config.validate import ConfigError
from titan.graph.ir.dialect import op_name
from titan.parallel.mesh import MeshSpec
from titan.train.recipes.flux_debug import RECIPE
from titan.train.testing.case import Case
from titan.train.testing.executed import run_xla
from titan.train.testing.graphs import graph_of
from titan.train.testing.grid import grid
from titan.train.testing.outcome import assert_same

FSDP_TP2, FSDP_TP4 = MeshSpec(("dp_shard", "tp"), (2, 2)), MeshSpec(("dp_shard", "tp"), (2, 4))
HSDP_TP2 = MeshSpec(("dp_replicate", "dp_shard", "tp"), (2, 2, 2))
TOLERANCE = 1e-5  # of the largest value: float32 sums in another order

CASES = {
    "fsdp2_tp2": Case("flux_shared", FSDP_TP2),
    "hsdp4_tp2_scan_kernels": Case("flux_shared", HSDP_TP2, scan=True, kernels=True, memory_policy="full"),
    "fused_fsdp2_tp4_scan": Case("flux_fused", FSDP_TP4, scan=True),
}


# The others have it too.
@pytest.mark.parametrize("case", grid(CASES, {"fsdp2_tp2"}))
def test_devices_that_share_the_work_equal_one(case):
    assert_same(run_xla(case), run_xla(Case(case.model)), TOLERANCE)


def test_blocks_sum_tokens_and_gather_the_vectors_of_images_alone():
    graph = graph_of(CASES["fsdp2_tp2"])
    counts = collections.Counter(
        (node.meta["region"], node.meta["module_fqn"], op_name(node.target).split(".")[1])
        for node in graph.module.graph.nodes
        if node.op == "call_function" and "tp" in node.args and op_name(node.target) != "titan.axis_index.default"
    )
    streams = [f"double_blocks.{index}.{stream}" for index in range(2) for stream in ("text", "image")]
    singles = [f"single_blocks.{index}" for index in range(2)]
    modulations = [f"{module}.modulation.linear" for module in (*streams, *singles)]
    expected = {("forward", name, "all_gather_along"): 1 for name in (*modulations, "final_modulation.linear")}
    # Of tokens there is one sum at the end of each block and, of gradients, one at its beginning.
    for module in (*streams, *singles):
        expected["forward", f"{module}.out", "all_reduce"] = 1
        expected["backward", f"{module}.projection", "all_reduce"] = 1
    for module in streams:
        expected["forward", f"{module}.feed_forward", "all_reduce"] = 1
        expected["backward", f"{module}.feed_forward", "all_reduce"] = 1
    # The rest are sums of gradients of whole weights, and of the squares of the gradients' norm.
    gradients = {key: count for key, count in counts.items() if key not in expected}
    assert {key: counts[key] for key in expected} == expected
    assert {(region, op) for region, _, op in gradients} == {("backward", "all_reduce"), ("optimizer", "all_reduce")}
    assert {module for _, module, _ in gradients if not module.startswith(("time", "pooled", "guidance"))} == {
        "", *(f"{module}.qkv.{norm}" for module in (*streams, *singles) for norm in ("q_norm", "k_norm"))
    }  # fmt: skip


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ConfigError) as error:
        parse(["flux_debug", "--parallelism.tensor_parallel=3"], RECIPE)
    expected = "--parallelism.tensor_parallel: 3 does not divide model.num_heads=4; give a divisor of it"
    assert str(error.value) == expected
    # The flag of sequence parallelism, which there is not for two streams of tokens, asks nothing of their number.
    config = parse(["flux_debug", "--parallelism.tensor_parallel=2", "--training.sequence_length=255"], RECIPE)
    assert config.parallelism.sequence_parallel
