"""Compiling for TPUs that are not there: the program is the TPU's, and the kernel in it the TPU's too."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from titan.kernels import tpu_compile
from titan.kernels.jax_op import jax_op
from titan.kernels.tpu_compile import compile_for_tpu


def _negate_kernel(x_ref, out_ref):
    out_ref[...] = -x_ref[...]


@jax_op("titan_test::negate", backward=None)
def negate(x: jax.Array) -> jax.Array:
    return -x


@negate.implementation("mosaic", platforms=("tpu",), pallas=True)
def _negate_mosaic(x: jax.Array) -> jax.Array:
    return pl.pallas_call(_negate_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.parametrize("generation", ["v6e", "tpu7x"])
def test_memory_and_cost_are_those_of_the_program(generation):
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    program = compile_for_tpu(lambda x: negate.jax(x) @ x, shape, generation=generation)
    assert program.argument_bytes == program.output_bytes == 2 * 1024 * 1024
    assert program.peak_bytes >= program.argument_bytes + program.output_bytes
    assert program.flops == pytest.approx(2 * 1024**3, rel=0.01)
    assert "tpu_custom_call" in program.compiled.as_text()


def test_a_wrong_name_or_a_missing_library_is_one_clear_line(monkeypatch):
    with pytest.raises(ValueError, match="no TPU 'v9' is known: name one of v5e, v5p, v6e, tpu7x"):
        compile_for_tpu(jnp.sin, generation="v9")
    monkeypatch.setattr(tpu_compile.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="needs the libtpu package: pip install libtpu"):
        compile_for_tpu(jnp.sin, generation="v6e")
