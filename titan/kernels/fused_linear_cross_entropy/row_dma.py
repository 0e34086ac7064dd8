"""Rows of a matrix read and written by DMA from HBM to HBM, as Mosaic kernels.

They do what `lax.dynamic_slice` and `lax.dynamic_update_slice` do, and exist for one reason: XLA on tpu7x wants the
bfloat16 operands of its matmuls in another memory layout than that of a program's arguments and of Mosaic's operands,
and where a loop slices a matrix it converts the whole matrix, before the loop. These kernels leave the matrix as it
is, so that only the rows at hand are converted.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from titan.kernels.fused_linear_cross_entropy.tiles import LANES

_SCALAR = pl.BlockSpec(memory_space=pltpu.SMEM)
_IN_HBM = pl.BlockSpec(memory_space=pl.ANY)


def can_move_rows(matrix: jax.Array) -> bool:
    """Whether the kernels take a matrix: its last rows fill a tile of memory, and XLA keeps it row by row.

    Where the columns are no multiple of 128, XLA keeps the matrix column by column to save padding, and each kernel
    would convert all of it.
    """
    return matrix.shape[0] % 16 == 0 and matrix.shape[1] % LANES == 0


def read_rows(matrix: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
    """Rows [start, start + size) of a matrix that `can_move_rows` takes; `start` is a multiple of 128."""

    def kernel(start_ref, matrix_ref, rows_ref, semaphore):
        rows = pl.ds(pl.multiple_of(start_ref[0], LANES), size)
        _copy(matrix_ref.at[rows], rows_ref, semaphore)

    return pl.pallas_call(
        kernel,
        in_specs=[_SCALAR, _IN_HBM],
        out_specs=_IN_HBM,
        out_shape=jax.ShapeDtypeStruct((size, matrix.shape[1]), matrix.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        name="read_rows",
    )(jnp.asarray(start, jnp.int32)[None], matrix)


def write_rows(matrix: jax.Array, rows: jax.Array, start: jax.Array | int) -> jax.Array:
    """The matrix with `rows` in place of those from `start`, a multiple of 128, on; in place where XLA can."""

    def kernel(start_ref, rows_ref, _, matrix_ref, semaphore):
        place = pl.ds(pl.multiple_of(start_ref[0], LANES), rows.shape[0])
        _copy(rows_ref, matrix_ref.at[place], semaphore)

    return pl.pallas_call(
        kernel,
        in_specs=[_SCALAR, _IN_HBM, _IN_HBM],
        out_specs=_IN_HBM,
        out_shape=jax.ShapeDtypeStruct(matrix.shape, matrix.dtype),
        input_output_aliases={2: 0},
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        name="write_rows",
    )(jnp.asarray(start, jnp.int32)[None], rows, matrix)


def _copy(source_ref, destination_ref, semaphore) -> None:
    copy = pltpu.make_async_copy(source_ref, destination_ref, semaphore)
    copy.start()
    copy.wait()
