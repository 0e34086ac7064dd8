"""The table of TPU generations: what is not in it is an error, and others can be added."""

import pytest

from titan.kernels import generations
from titan.kernels.generations import (
    GENERATIONS,
    Generation,
    UnknownTpuError,
    find_generation,
    generation_of,
    register_generation,
)
from titan.kernels.target import Target
from titan.kernels.vmem import vmem_budget_bytes


@pytest.fixture(autouse=True)
def table(monkeypatch):
    entries = dict(GENERATIONS)
    monkeypatch.setattr(generations, "_GENERATIONS", entries)
    return entries


NEW = Generation(("TPU v9",), 64 * 2**20, "v9:2x2x1", 500.0)


def test_each_kind_of_device_is_of_one_generation():
    kinds = [kind for generation in GENERATIONS.values() for kind in generation.device_kinds]
    assert len(kinds) == len(set(kinds))
    assert [generation_of(kind) for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")] == [*GENERATIONS]


def test_what_is_not_in_the_table_is_an_error():
    with pytest.raises(UnknownTpuError, match="TPUs of the kind 'TPU v9' are unknown: add their generation by "):
        _ = Target("tpu", "TPU v9").generation
    with pytest.raises(UnknownTpuError, match="no TPU generation 'v9' is known: name one of v5e, v5p, v6e, tpu7x"):
        find_generation("v9")
    assert Target("gpu", "NVIDIA H200").generation == Target("cpu").generation == ""


def test_a_generation_can_be_added_once():
    register_generation("v9", NEW)
    register_generation("v9", NEW)  # a plugin that is imported twice
    assert Target("tpu", "TPU v9").generation == "v9"
    assert vmem_budget_bytes("v9") == 64 * 2**20
    with pytest.raises(ValueError, match="two TPU generations 'v9'"):
        register_generation("v9", Generation(("TPU v9x",), 1, "v9:2x2x1", 1.0))
    with pytest.raises(ValueError, match="'v10': device kind 'TPU v9' is that of 'v9'"):
        register_generation("v10", NEW)
