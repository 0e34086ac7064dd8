"""Compiling for TPUs that are not there: the program is the TPU's, and the kernel in it the TPU's too."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from titan.kernels import tpu_topology
from titan.kernels.jax_op import jax_op
from titan.kernels.tpu_compile import compile_for_tpu

_BLOCK_ROWS = 128
_METADATA = {"rows": str(_BLOCK_ROWS)}


def _negate_kernel(x_ref, out_ref):
    out_ref[...] = -x_ref[...]


@jax_op("titan_test::negate", backward=None)
def negate(x: jax.Array) -> jax.Array:
    return -x


# Metadata, which JAX's splash attention has too, makes several lines of the kernel's instruction.
@negate.implementation("mosaic", platforms=("tpu",), pallas=True)
def _negate_mosaic(x: jax.Array) -> jax.Array:
    block = pl.BlockSpec((_BLOCK_ROWS, x.shape[1]), lambda row: (row, 0))
    out_shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    grid = (x.shape[0] // _BLOCK_ROWS,)
    return pl.pallas_call(
        _negate_kernel, grid=grid, in_specs=[block], out_specs=block, out_shape=out_shape, metadata=_METADATA
    )(x)


@pytest.mark.parametrize("generation", ["v6e", "tpu7x"])
def test_memory_and_cost_are_those_of_the_program(generation):
    dim = 8192  # too large for VMEM as a whole
    shape = jax.ShapeDtypeStruct((dim, dim), jnp.bfloat16)
    program = compile_for_tpu(lambda x: negate.jax(x) @ x, shape, generation=generation)
    assert program.argument_bytes == program.output_bytes == 2 * dim * dim
    assert program.peak_bytes >= program.argument_bytes + program.output_bytes
    assert program.flops == pytest.approx(2 * dim**3, rel=0.01)
    block_bytes = 2 * _BLOCK_ROWS * dim
    assert 4 * block_bytes <= program.vmem_bytes < 5 * block_bytes  # the block and the result, two buffers each
    assert compile_for_tpu(jnp.sin, shape, generation=generation).vmem_bytes == 0


def test_a_wrong_name_or_a_missing_library_is_one_clear_line(monkeypatch):
    with pytest.raises(ValueError, match="no TPU generation 'v9' is known: name one of v5e, v5p, v6e, tpu7x"):
        compile_for_tpu(jnp.sin, generation="v9")
    monkeypatch.setattr(tpu_topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="needs the libtpu package: pip install libtpu"):
        compile_for_tpu(jnp.sin, generation="v6e")
