"""What a plan makes of a model: weights, borders, and the mistakes that would pass in silence. Values: titan/train."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from titan.parallel.mesh import MeshSpec, fake_world
from titan.parallel.module_boundaries import place_borders
from titan.parallel.parallel_plan import Border, ModulePlan, ParallelPlan, SharedParts, Split, Whole
from titan.parallel.segments import Segments
from titan.parallel.simple_fsdp import ShardingPolicy, fsdp_placements, simple_fsdp
from titan.parallel.tensor_parallel import tensor_parallel_borders, tensor_parallel_weights
from titan.parallel.weight_plan import WeightPlan, merged_plans

PLAN = ParallelPlan(
    {
        "layers.*": ModulePlan({"weight": Whole.ON_TOKENS}, Border.BLOCK),
        "inner": ModulePlan({"weight": Whole.ON_PARTS}),
        "table": ModulePlan({"weight": Split(0)}, Border.VOCABULARY),
    },
    sizes=(),
)


def model() -> nn.Module:
    built = nn.Module()
    built.layers = nn.ModuleList([nn.RMSNorm(4), nn.RMSNorm(4)])
    built.inner = nn.RMSNorm(4)
    built.table = nn.Embedding(8, 4)
    return built


def test_weights_are_split_or_their_gradients_parts():
    split, part = WeightPlan({"tp": 0}), WeightPlan(partial=("tp",))
    with_tokens_split = tensor_parallel_weights(model(), PLAN, axis="tp", size=2, sequence_parallel=True)
    assert with_tokens_split == {
        "layers.0.weight": part, "layers.1.weight": part, "inner.weight": part, "table.weight": split
    }  # fmt: skip
    with_whole_tokens = tensor_parallel_weights(model(), PLAN, axis="tp", size=2, sequence_parallel=False)
    assert with_whole_tokens == {"inner.weight": part, "table.weight": split}


def test_each_segment_of_a_weight_is_split_and_a_bias_of_a_sum_shared():
    built = nn.Module()
    built.rows, built.columns = nn.Linear(8, 12), nn.Linear(4, 8)
    plan = ParallelPlan(
        {
            "rows": ModulePlan({"weight": Split(0, segments=3), "bias": Split(0, segments=3)}, Border.BEGIN),
            "columns": ModulePlan({"weight": Split(1), "bias": Whole.ON_SUM}, Border.END),
        },
        sizes=(),
    )
    weights = tensor_parallel_weights(built, plan, axis="tp", size=2, sequence_parallel=True)
    segments = Segments(0, 3)
    assert weights == {
        "rows.weight": WeightPlan({"tp": 0}, segments=segments),
        "rows.bias": WeightPlan({"tp": 0}, segments=segments),
        "columns.weight": WeightPlan({"tp": 1}),
        "columns.bias": WeightPlan(num_shares=2),
    }
    mesh = MeshSpec(("dp_shard", "tp"), (4, 2))
    assert weights["rows.weight"].stored_shape((12, 8)) == (3, 4, 8)
    assert fsdp_placements((12, 8), mesh, ShardingPolicy(), weights["rows.weight"]) == (Shard(2), Shard(1))
    assert fsdp_placements((12,), mesh, ShardingPolicy(), weights["rows.bias"]) == (Replicate(), Shard(1))
    with pytest.raises(ValueError, match="tp=4 does not divide dim 0 of a weight of shape"):
        fsdp_placements((6, 8), MeshSpec(("tp",), (4,)), ShardingPolicy(), weights["rows.weight"])
    with pytest.raises(ValueError, match=r"dim 0 of a weight of shape \(8, 8\) is not 3 equal segments"):
        fsdp_placements((8, 8), mesh, ShardingPolicy(), weights["rows.weight"])

    # Rank 0 computes its part of each segment, and its part of the sum of the two devices' products.
    torch.manual_seed(0)
    whole = {name: weight.detach().clone() for name, weight in built.named_parameters()}
    tokens = torch.randn(1, 2, 8)
    with fake_world(MeshSpec(("tp",), (2,))) as mesh:
        borders = tensor_parallel_borders(built, plan, axis="tp", size=2, sequence_parallel=False)
        simple_fsdp(place_borders(built, mesh, borders), mesh, ShardingPolicy(), weights)
        rows = built.rows(tokens)
        shared = built.columns.bias
    own = torch.nn.functional.linear(tokens, whole["rows.weight"], whole["rows.bias"]).unflatten(-1, (3, 4))[..., :2]
    torch.testing.assert_close(rows, own.flatten(2))
    assert torch.equal(shared, whole["columns.bias"] / 2)


def test_a_weight_without_a_plan_is_refused():
    built = model()
    built.inner.bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="does not say how weight inner.bias lies"):
        tensor_parallel_weights(built, PLAN, axis="tp", size=2, sequence_parallel=True)


def test_two_patterns_for_one_module_are_refused():
    plan = ParallelPlan({**PLAN.modules, "*.0": ModulePlan({"weight": Whole.ON_PARTS})}, sizes=())
    with pytest.raises(ValueError, match=r"layers.0 is meant by both layers.\* and \*.0"):
        tensor_parallel_weights(model(), plan, axis="tp", size=2, sequence_parallel=True)


def test_a_border_changes_a_module_once_and_keeps_what_it_is():
    built = model()
    borders = tensor_parallel_borders(built, PLAN, axis="tp", size=2, sequence_parallel=True)
    assert list(borders) == ["layers.0", "layers.1", "table"]
    with fake_world(MeshSpec(("tp",), (2,))) as mesh:
        with pytest.raises(ValueError, match="there is no module head to put a border around"):
            place_borders(built, mesh, {**borders, "head": borders["table"]})
        assert type(built.table) is nn.Embedding
        place_borders(built, mesh, borders)
        # A device's slice of the tokens in, the same out: [B, T / tp, E].
        assert built.layers[0](torch.ones(2, 3, 4)).shape == (2, 3, 4)
        assert built.table(torch.zeros(2, 6, dtype=torch.int32)).shape == (2, 3, 4)
        with pytest.raises(ValueError, match="module layers.0 has a border already"):
            place_borders(built, mesh, borders)
    assert isinstance(built.table, nn.Embedding) and type(built.layers[0]) is type(built.layers[1])


@pytest.mark.parametrize("size, columns", [(2, 4), (4, 2), (8, 2)])
def test_parts_are_made_whole_where_devices_share_them(size, columns):
    plan = ParallelPlan({"kv": ModulePlan({"weight": Split(0)}, Border.SHARED)}, (), SharedParts("num_kv_heads", 4, 2))
    built = nn.Module()
    built.kv = nn.Linear(3, 8, bias=False)
    borders = tensor_parallel_borders(built, plan, axis="tp", size=size, sequence_parallel=True)
    assert list(borders) == (["kv"] if size > 4 else [])
    built.kv.weight = nn.Parameter(torch.ones(8 // size, 3))
    with fake_world(MeshSpec(("tp",), (size,))) as mesh:
        place_borders(built, mesh, borders)
        assert built.kv(torch.ones(2, 6, 3)).shape == (2, 6, columns)


def test_a_module_that_communicates_inside_gets_the_axes():
    class Inner(nn.Module):
        def bind_axes(self, axes):
            self.sizes = {name: axis.size for name, axis in axes.items()}

    built = nn.Sequential(Inner())
    with fake_world(MeshSpec(("dp_shard", "tp"), (4, 2))) as mesh:
        place_borders(built, mesh, {})
    assert built[0].sizes == {"dp_shard": 4, "tp": 2}


def test_plans_of_several_axes_merge_and_of_one_clash():
    experts, inner = {"w": WeightPlan({"ep": 0})}, {"w": WeightPlan({"tp": 2}), "norm": WeightPlan(partial=("tp",))}
    assert merged_plans(experts, inner) == {
        "w": WeightPlan({"ep": 0, "tp": 2}), "norm": WeightPlan(partial=("tp",))
    }  # fmt: skip
    cut, shared = WeightPlan({"tp": 0}, segments=Segments(0, 3)), WeightPlan(num_shares=2)
    assert merged_plans({"w": WeightPlan({"ep": 1}), "b": shared}, {"w": cut}) == {
        "w": WeightPlan({"ep": 1, "tp": 0}, segments=Segments(0, 3)), "b": shared
    }  # fmt: skip
    with pytest.raises(ValueError, match="two plans for the segments or the shares of weight b"):
        merged_plans({"b": shared}, {"b": WeightPlan({"ep": 0}, num_shares=4)})
    with pytest.raises(ValueError, match="two plans for weight w along axis tp"):
        merged_plans(inner, {"w": WeightPlan(partial=("tp",))})
