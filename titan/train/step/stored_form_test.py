"""A state with stacks and the same state layer by layer."""

import numpy as np
import pytest
import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from titan.core.init import Normal
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec
from titan.parallel.segments import Segments
from titan.train.config.compile import TpuConfig
from titan.train.config.run import Config
from titan.train.optimizers.registry import make_optimizer
from titan.train.runtime.torch import TorchRuntime
from titan.train.runtime.xla import XlaRuntime
from titan.train.step.state import PARAMS, per_parameter
from titan.train.step.stored_form import Stacks

_STACKS = Stacks({"w": ("a", "b", "c")})
_CUT = Stacks({"w": ("a", "b", "c"), "s": ("d", "e")}, {"s": Segments(1, 3), "x": Segments(0, 2)})
_WEIGHTS = {"a": (8, 4), "b": (8, 4), "c": (8, 4), "d": (2, 6), "e": (2, 6), "x": (4,)}


def test_a_state_goes_layer_by_layer_and_back() -> None:
    state = {"w": np.arange(6).reshape(3, 2), "x": np.arange(4)}
    by_layer = _STACKS.unstacked(state, lambda stack, turn: stack[turn])
    assert {name: array.tolist() for name, array in by_layer.items()} == {
        "a": [0, 1], "b": [2, 3], "c": [4, 5], "x": [0, 1, 2, 3]
    }  # fmt: skip
    back = _STACKS.stacked(by_layer, ["x", "w"], np.stack)
    assert list(back) == ["x", "w"]
    for name, array in state.items():
        np.testing.assert_array_equal(back[name], array)
    assert Stacks().unstacked(state, lambda stack, turn: stack[turn]) == state
    assert list(_STACKS.stacked(by_layer, ["x"], np.stack)) == ["x"]


def test_names_and_prefixes() -> None:
    assert (_STACKS.names("w"), _STACKS.names("x")) == (("a", "b", "c"), ("x",))
    both = _STACKS.in_state(("params/", "exp_avg/"))
    assert both.names("params/w") == ("params/a", "params/b", "params/c")
    assert both.names("exp_avg/w") == ("exp_avg/a", "exp_avg/b", "exp_avg/c")
    assert both.names("w") == ("w",)


def test_layouts_layer_by_layer() -> None:
    layouts = {
        "w": TensorLayout((3, 8, 4), torch.float32, (Replicate(), Shard(1))),
        "x": TensorLayout((8,), torch.int32, (Shard(0), Replicate())),
    }
    part = TensorLayout((8, 4), torch.float32, (Replicate(), Shard(0)))
    assert _STACKS.unstacked_layouts(layouts) == {"a": part, "b": part, "c": part, "x": layouts["x"]}


def test_segments_are_the_first_dim_of_each_weight() -> None:
    weights = {"d": np.arange(12).reshape(2, 6), "e": np.arange(12, 24).reshape(2, 6), "x": np.arange(4)}
    state = _CUT.stacked(weights, ["s", "x"], np.stack)
    assert state["s"].shape == (2, 3, 2, 2)
    assert state["s"][1, 0].tolist() == [[12, 13], [18, 19]]
    assert state["x"].tolist() == [[0, 1], [2, 3]]
    back = _CUT.unstacked(state, lambda stack, turn: stack[turn])
    for name, array in weights.items():
        np.testing.assert_array_equal(back[name], array)
    # Heads of device 0 in each of two segments, as tensor parallelism splits them.
    assert Segments(0, 2).joined(state["x"][:, :1]).tolist() == [0, 2]


PER_PARAMETER = per_parameter(make_optimizer(Config()))
EXP_AVG, EXP_AVG_SQ = PER_PARAMETER[1:]


def _runtimes(kind: str):
    """A runtime whose state has a stack, and one with the same state layer by layer."""
    on_mesh = kind == "xla"
    spec = MeshSpec(("dp_shard",), (2,)) if on_mesh else MeshSpec((), ())
    config = Config(tpu_config=TpuConfig(num_virtual_devices=2))
    layouts = {
        "w": TensorLayout((3, 8, 4), torch.float32, (Shard(1),) if on_mesh else ()),
        "s": TensorLayout((2, 3, 2, 2), torch.float32, (Shard(3),) if on_mesh else ()),
        "x": TensorLayout((2, 2), torch.float32, (Shard(1),) if on_mesh else ()),
    }
    stacked = {f"{prefix}{name}": layout for prefix in PER_PARAMETER for name, layout in layouts.items()}
    stacks = _CUT.in_state(PER_PARAMETER)
    runtimes = [(XlaRuntime if on_mesh else TorchRuntime)(config) for _ in range(2)]
    runtimes[0].prepare(spec, stacked, stacks)
    runtimes[1].prepare(spec, stacks.unstacked_layouts(stacked), Stacks())
    return runtimes


@pytest.mark.parametrize("kind", ["xla", "torch"])
def test_runtimes_with_and_without_stacks_restore_one_anothers_state_bit_for_bit(kind: str) -> None:
    plan = {name: Normal(1.0 + index) for index, name in enumerate(_WEIGHTS)}
    with_stacks, without = _runtimes(kind)
    states = [runtime.initial_state(plan, 7) for runtime in (with_stacks, without)]
    for state in states:  # moments that are not all zero
        for name in list(state):
            if name.startswith(EXP_AVG):
                state[name] = state[name.replace(EXP_AVG, PARAMS)] * 0.5
            elif name.startswith(EXP_AVG_SQ):
                state[name] = state[name.replace(EXP_AVG_SQ, PARAMS)] ** 2
    saved = [
        {name: np.array(array) for name, array in runtime.to_arrays(state).items()}
        for runtime, state in zip((with_stacks, without), states, strict=True)
    ]
    assert sorted(saved[0]) == sorted(f"{prefix}{name}" for prefix in PER_PARAMETER for name in _WEIGHTS)
    assert len({array.tobytes() for array in saved[0].values()}) == len(saved[0])
    for name, array in saved[1].items():
        assert saved[0][name].tobytes() == array.tobytes(), name
    assert {name: array.shape for name, array in saved[0].items()} == {
        name: array.shape for name, array in with_stacks.abstract_state().items()
    }
    restored = with_stacks.from_arrays(without.to_arrays(states[1]))
    for name, array in states[0].items():
        assert np.array_equal(np.asarray(restored[name]), np.asarray(array)), name
        assert np.asarray(array).shape[0] == (3 if name.endswith("w") else 2)
    weights = with_stacks.host_parameters(restored)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == _WEIGHTS
    placed = with_stacks.place_parameters(weights)
    for name, array in placed.items():
        assert np.array_equal(np.asarray(array), np.asarray(restored[name])), name
