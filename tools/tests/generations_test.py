"""The two tables of TPU generations, of `core` and of `kernels`, know the same chips and state the same ratio."""

import pytest

from titan.core.hardware import HARDWARE
from titan.core.tpu_flags import TPU_FLAG_BUNDLES
from titan.kernels.generations import GENERATIONS


def test_both_tables_have_the_same_generations():
    assert list(HARDWARE) == list(GENERATIONS)
    for name, hardware in HARDWARE.items():
        assert hardware.device_kinds == GENERATIONS[name].device_kinds, name
        dims = GENERATIONS[name].smallest_slice.removeprefix(f"{name}:").split("x")
        assert len(dims) == hardware.slice_dims, name


def test_flops_per_byte_are_those_of_the_hardware():
    for name, hardware in HARDWARE.items():
        expected = hardware.peak_bf16_flops / hardware.hbm_bytes_per_second
        assert GENERATIONS[name].flops_per_byte == pytest.approx(expected, rel=1e-12), name


def test_bundles_of_compiler_flags_name_known_generations():
    for name, bundle in TPU_FLAG_BUNDLES.items():
        assert set(bundle.generations) <= set(HARDWARE), name
