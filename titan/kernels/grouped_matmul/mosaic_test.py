"""Compiles with the real Mosaic compiler, at the shape of 8192 tokens x top-8 of 128 experts."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from titan.kernels.generations import MIB
from titan.kernels.grouped_matmul.arg_specs import REAL, aot_cases, forward_and_backward
from titan.kernels.grouped_matmul.op import grouped_matmul_op
from titan.kernels.grouped_matmul.tuning import tuning_cases
from titan.kernels.kernel_case import KernelCase
from titan.kernels.tpu_compile import TpuProgram, compile_for_tpu

SHAPE = REAL[0]


def case(name: str, generation: str) -> KernelCase:
    (found,) = (case for case in aot_cases(generation) if case.name == f"{name} {SHAPE}")
    return found


def check(program: TpuProgram, vmem_bytes: int) -> None:
    assert program.temp_bytes < 3 * MIB  # the schedule: neither rows nor weights are copied
    assert 0.8 * vmem_bytes < program.vmem_bytes <= vmem_bytes


@pytest.mark.parametrize("name", ["up", "paired"])
@pytest.mark.parametrize("generation", ["v6e", "tpu7x"])
def test_automatic_kernels_compile_at_a_real_shape(name: str, generation: str) -> None:
    real = case(name, generation)
    check(compile_for_tpu(real.fused, *real.args, generation=generation), real.vmem_bytes)


def test_own_kernels_of_the_single_matmul_compile_at_a_real_shape() -> None:
    real = case("down", "v6e")
    program = compile_for_tpu(forward_and_backward(grouped_matmul_op, "mosaic"), *real.args, generation="v6e")
    check(program, real.vmem_bytes)


def test_tokamax_compiles_at_a_real_shape() -> None:
    real = case("up", "v6e")
    program = compile_for_tpu(forward_and_backward(grouped_matmul_op, "tokamax"), *real.args, generation="v6e")
    assert program.temp_bytes < 3 * MIB


@pytest.mark.parametrize("implementation", ["megablox", "tokamax", "mosaic"])
def test_dims_that_blocks_do_not_divide_compile(implementation: str) -> None:

    def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    run = forward_and_backward(grouped_matmul_op, implementation)
    args = (spec(1000, 200), spec(5, 200, 72), spec(5, dtype=jnp.int32), spec(1000, 72))
    compile_for_tpu(run, *args, generation="v6e")


@pytest.mark.parametrize(
    ("kernel", "passes"), [("grouped_matmul", ["drhs"]), ("paired_grouped_matmul", ["forward", "dlhs", "drhs"])]
)
def test_tuning_cases_compile_under_the_names_they_give(kernel: str, passes: list[str]) -> None:
    cases = [case for case in tuning_cases("v6e") if case.kernel == kernel and case.pass_name in passes]
    for case in cases[: len(passes)]:
        program = compile_for_tpu(case.build(case.candidates[0]), *case.args, generation="v6e")
        text = program.compiled.as_text()
        names = re.findall(r"%(\w+)[\w.]* = [^\n]*custom_call_target=\"tpu_custom_call\"", text)
        assert names == [case.hlo_name]
