"""A state with stacks and the same state layer by layer."""

import numpy as np
import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from titan.parallel.layout import TensorLayout
from titan.train.stacks import Stacks

_STACKS = Stacks({"w": ("a", "b", "c")})


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
