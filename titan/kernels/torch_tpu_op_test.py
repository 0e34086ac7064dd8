"""Registration with TorchTPU, which is not installed here: what its `torch.tpu.pallas.jax_op` is given.

The double below holds functions to the rules of torch_tpu 0.2.0 (`_verify_signature`): every parameter annotated with a
plain type, a result of arrays or tuples of arrays, and registers them as it does, by `torch.library.custom_op`.
"""

import inspect
import sys
import types
import typing
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch

from titan.kernels.jax_op import jax_op
from titan.kernels.target import Target, current_target

_PLAIN = (bool, int, float, str, Sequence[int], Sequence[float], jax.Array, jax.Array | None)


class Scaled(NamedTuple):
    out: jax.Array
    total: jax.Array


@pytest.fixture
def torch_tpu(monkeypatch):
    """The functions given to TorchTPU, by name."""
    given = {}

    def register(name, function):
        signature = inspect.signature(function, eval_str=True)
        for parameter in signature.parameters.values():
            assert parameter.annotation in _PLAIN, parameter
        results = typing.get_args(signature.return_annotation) or (signature.return_annotation,)
        assert set(results) == {jax.Array}
        given[name] = function
        schema = "(Tensor x, *, float factor=2., int[] sizes=[1], str implementation='auto') -> (Tensor, Tensor)"
        return torch.library.custom_op(name, function, mutates_args=(), schema=schema)

    pallas = types.SimpleNamespace(jax_op=register)
    tpu = types.SimpleNamespace(pallas=pallas, get_device_name=lambda: "TPU v6e")
    monkeypatch.setattr(torch, "tpu", tpu, raising=False)
    monkeypatch.setitem(sys.modules, "torch.tpu", tpu)
    return given


def test_the_same_function_under_the_same_name_for_the_tpu(torch_tpu):
    targets = []

    @jax_op("titan_test::scaled_for_tpu", backward=None)
    def scaled(x: jax.Array, *, factor: float = 2.0, sizes: tuple[int, ...] = (1,)) -> Scaled:
        targets.append(current_target())
        return Scaled(x * factor, jnp.sum(x))

    (function,) = torch_tpu.values()
    assert list(torch_tpu) == ["titan_test::scaled_for_tpu"]
    out, total = function(jnp.ones(3), factor=3.0, sizes=(1,), implementation="auto")
    assert (out.tolist(), float(total)) == ([3.0, 3.0, 3.0], 3.0)
    assert targets[-1] == Target("tpu", "TPU v6e")
    assert targets[-1].generation == "v6e"
    # Tensors on the CPU take the same path as without TorchTPU.
    assert scaled(torch.ones(2), factor=5.0).out.tolist() == [5.0, 5.0]
    assert targets[-1].platform == "cpu"
