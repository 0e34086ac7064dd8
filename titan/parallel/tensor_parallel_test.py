"""What a plan makes of a model: weights, borders, and the mistakes that would pass in silence. Values: titan/train."""

import pytest
import torch
from torch import nn

from titan.parallel.mesh import MeshSpec, fake_world
from titan.parallel.module_borders import place_borders
from titan.parallel.parallel_plan import Border, ModulePlan, ParallelPlan, SharedParts, Split, Whole
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
    with_tokens_split = tensor_parallel_weights(model(), PLAN, axis="tp", sequence_parallel=True)
    assert with_tokens_split == {
        "layers.0.weight": part, "layers.1.weight": part, "inner.weight": part, "table.weight": split
    }  # fmt: skip
    with_whole_tokens = tensor_parallel_weights(model(), PLAN, axis="tp", sequence_parallel=False)
    assert with_whole_tokens == {"inner.weight": part, "table.weight": split}


def test_a_weight_without_a_plan_is_refused():
    built = model()
    built.inner.bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match="does not say how weight inner.bias lies"):
        tensor_parallel_weights(built, PLAN, axis="tp", sequence_parallel=True)


def test_two_patterns_for_one_module_are_refused():
    plan = ParallelPlan({**PLAN.modules, "*.0": ModulePlan({"weight": Whole.ON_PARTS})}, sizes=())
    with pytest.raises(ValueError, match=r"layers.0 is meant by both layers.\* and \*.0"):
        tensor_parallel_weights(model(), plan, axis="tp", sequence_parallel=True)


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
    with pytest.raises(ValueError, match="two plans for weight w along axis tp"):
        merged_plans(inner, {"w": WeightPlan(partial=("tp",))})
