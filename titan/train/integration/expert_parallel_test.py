"""Expert parallelism against one device: losses, gradients, parameters and what the routers are said to have done."""

import dataclasses

import numpy as np
import pytest
import torch

from titan.core.config.validate import ConfigError
from titan.models.qwen3.config import Qwen3MoeConfig
from titan.parallel.mesh import MeshSpec
from titan.train.config.expert_balance import ExpertBalanceConfig
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.run import Config
from titan.train.sharding.expert_parallel import _table
from titan.train.testing.case import Case
from titan.train.testing.executed import run_xla
from titan.train.testing.graphs import assert_one_program, captured
from titan.train.testing.grid import grid
from titan.train.testing.outcome import assert_same

FSDP_EP = MeshSpec(("dp_shard", "ep"), (2, 2))
FSDP_EP8 = MeshSpec(("dp_shard", "ep"), (2, 4))
HSDP_EP8 = MeshSpec(("dp_replicate", "dp_shard", "ep"), (2, 2, 2))
DDP_EP = MeshSpec(("dp_replicate", "ep"), (2, 2))
EP_CP = MeshSpec(("ep", "cp"), (2, 2))
EP_TP = MeshSpec(("dp_shard", "ep", "tp"), (2, 2, 2))
BALANCED = ExpertBalanceConfig(bias=True, bias_rate=0.02, auxiliary_loss=0.3)
# float32 sums in another order, in units of a tensor's largest value.
TOLERANCE = 1e-5


CASES = {
    "fsdp2_ep2": Case("qwen3_moe", FSDP_EP, balance=BALANCED),
    "hsdp4_ep2_grouped_scan": Case("qwen3_moe_grouped", HSDP_EP8, scan=True, memory_policy="full", balance=BALANCED),
    "fsdp2_ep2_split_offload": Case(
        "qwen3_moe_grouped", FSDP_EP, split=True, memory_policy="offload", balance=BALANCED
    ),
    "replicas2_ep2_microbatches_scan": Case("qwen3_moe", DDP_EP, microbatches=2, scan=True, balance=BALANCED),
    "ep2_cp2": Case("qwen3_moe", EP_CP, balance=BALANCED),
    "fsdp2_ep2_tp2": Case("qwen3_moe", EP_TP, balance=BALANCED),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_one_device(case):
    got, expected = run_xla(case), run_xla(Case("qwen3_moe", microbatches=case.microbatches, balance=BALANCED))
    assert_same(got, expected, TOLERANCE)
    assert np.array_equal(got.expert_bias, expected.expert_bias)


@pytest.mark.parametrize("case", grid(CASES, CASES.keys() - {"fsdp2_ep2"}))
def test_every_device_has_the_same_program(case):
    assert_one_program(case)


def test_with_a_capacity_equals_as_many_devices_with_all_experts_each():
    case = Case("qwen3_moe_dropping", FSDP_EP8)
    expected = run_xla(dataclasses.replace(case, mesh=MeshSpec(("dp_shard",), (8,))))
    assert_same(run_xla(case), expected, TOLERANCE)
    assert expected.metrics[0]["dropped_fraction"] > 0.05


def test_experts_are_split_and_everything_else_is_sharded_over_both_axes():
    state = captured(Case("qwen3_moe", FSDP_EP, balance=BALANCED)).state
    axes = {name.removeprefix("params/layers.0."): layout.axes_by_dim(FSDP_EP) for name, layout in state.items()}
    assert axes["feed_forward.experts.w1"] == (("ep",), ("dp_shard",), ())
    assert axes["feed_forward.experts.w2"] == (("ep",), ("dp_shard",), ())
    assert axes["feed_forward.router.weight"] == axes["attention.wq.weight"] == (("dp_shard", "ep"), ())


@pytest.mark.parametrize(
    ("model", "rows_of_tokens", "rows_of_experts"),
    # Of 32 tokens on a device, 2 choices each: from both devices all, twice; or 8 for each expert of 8.
    [("qwen3_moe", 2 * 32, 2 * 32 * 2), ("qwen3_moe_dropping", 2 * 32, 2 * 8 * 4)],
)
def test_buffers_are_as_large_as_documented(model, rows_of_tokens, rows_of_experts):
    graph = captured(Case(model, FSDP_EP, balance=BALANCED)).module.graph
    shapes = [tuple(node.meta["val"].shape) for node in graph.nodes if "all_to_all" in str(node.target)]
    # Choices, tokens and weights there, results back; three of them again for gradients; in each of two layers.
    assert len(shapes) == 2 * 7 and {rows for rows, _ in shapes} == {rows_of_tokens}
    silu = torch.ops.aten.silu.default
    assert {node.meta["val"].shape[0] for node in graph.find_nodes(op="call_function", target=silu)} == {
        rows_of_experts
    }


def test_a_token_is_sent_once_to_each_device_that_it_needs():
    devices = torch.tensor([[0, 0, 2], [1, 3, 3], [2, 1, 2], [3, 3, 3]])  # 3: nobody
    table = _table(devices, num_devices=3, room=2)
    assert table.take(torch.tensor([10, 11, 12, 13]), -1).tolist() == [10, -1, 11, 12, 10, 12]
    assert table.collect(2.0 ** torch.arange(6), torch.float32).tolist() == [1 + 16, 4, 8 + 32, 0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(), "--parallelism.expert_parallel: Llama3 has no experts; leave it at 1, or train a mixture of "),
        (
            Config(model=Qwen3MoeConfig(num_experts=6)),
            "--parallelism.expert_parallel: 4 does not divide model.num_experts=6; give a divisor of it",
        ),
    ],
)
def test_what_cannot_be_spread_is_one_line(config, message):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(config, parallelism=ParallelismConfig(expert_parallel=4)).validate()
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
