"""Compiles with the real TPU compilers, at 8192 tokens x top-8 with dim 4096: no float32 copy of the rows exists."""

import pytest

from titan.kernels.generations import MIB
from titan.kernels.route_scores.arg_specs import aot_cases
from titan.kernels.tpu_compile import compile_for_tpu


@pytest.mark.parametrize("generation", ["v6e", "tpu7x"])
def test_the_kernel_compiles_at_a_real_shape(generation: str) -> None:
    case = aot_cases(generation)[0]
    program = compile_for_tpu(case.fused, *case.args, generation=generation)
    assert program.temp_bytes < MIB  # a float32 [M, E] is 1024 MiB
    assert 0.7 * case.vmem_bytes < program.vmem_bytes <= case.vmem_bytes


@pytest.mark.parametrize("generation", ["v6e", "tpu7x"])
def test_xla_fuses_it_as_well(generation: str) -> None:
    case = aot_cases(generation)[0]
    program = compile_for_tpu(case.unfused, *case.args, generation=generation)
    assert program.temp_bytes < MIB
    assert program.hbm_bytes < 1.01 * case.hbm_bytes  # each array once: what makes it the default
