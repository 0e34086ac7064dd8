"""Tensor parallelism of FLUX.1: layers split over devices, alone and with FSDP and HSDP, equal one device."""

import collections

import pytest

from titan.graph.dialect import op_name
from titan.parallel.mesh import MeshSpec
from titan.train.steps_for_test import ONE, Case, assert_same, evaluate_xla, graph_of, run_xla

TP2, TP4 = MeshSpec(("tp",), (2,)), MeshSpec(("tp",), (4,))
FSDP_TP2, FSDP_TP4 = MeshSpec(("dp_shard", "tp"), (2, 2)), MeshSpec(("dp_shard", "tp"), (2, 4))
HSDP_TP2 = MeshSpec(("dp_replicate", "dp_shard", "tp"), (2, 2, 2))
TOLERANCE = 1e-5  # of the largest value: float32 sums in another order

CASES = {
    "fsdp2_tp2": Case("flux_shared", FSDP_TP2),
    "hsdp4_tp2_scan_kernels": Case("flux_shared", HSDP_TP2, scan=True, kernels=True, memory_policy="full"),
    "fused_fsdp2_tp4_scan": Case("flux_fused", FSDP_TP4, scan=True),
    "fused_tp4": Case("flux_fused", TP4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_devices_that_share_the_work_equal_one(case):
    assert_same(run_xla(case), run_xla(Case(case.model)), TOLERANCE)
