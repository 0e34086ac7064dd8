"""The grouped matmul as JAX and tokamax ship it, with their gaps filled.

They leave output rows after the last group uninitialised, and megablox wants the rows divisible by its tile. Gradients
are called one by one, because their own autograd takes the forward's tiles (megablox) or 128 x 128 x 128 (tokamax).
"""

import jax
import jax.numpy as jnp

from titan.kernels._compat import megablox, tokamax_gmm
from titan.kernels.grouped_matmul.tiles import Blocks
from titan.kernels.target import current_target

_FORWARD = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
_PRECISION = (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT)
_CONTRACT_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def megablox_rows_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, tiles: tuple[int, int, int], transpose_rhs: bool
) -> jax.Array:
    """`jax.experimental.pallas.ops.tpu.megablox`: rows [M, C] by [G, C, N], or by [G, N, C] transposed.

    Args:
      tiles: rows, contracted columns, output columns.
    """
    num_rows = lhs.shape[0]
    out = megablox().gmm(_pad_rows(lhs, tiles[0]), rhs, group_sizes, lhs.dtype, tiles, transpose_rhs=transpose_rhs)
    return zero_unowned_rows(out[:num_rows], group_sizes)


def megablox_weight_gradient(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array, *, tiles: Blocks) -> jax.Array:
    """megablox: lhs^T grad over the rows of each group, [G, K, N]."""
    lhs, grad = _pad_rows(lhs, tiles.tile_m), _pad_rows(grad, tiles.tile_m)
    return megablox().tgmm(lhs.swapaxes(0, 1), grad, group_sizes, grad.dtype, tuple(tiles))


def tokamax_rows_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, tiles: tuple[int, int, int], transpose_rhs: bool
) -> jax.Array:
    """Tokamax' Mosaic kernel, below its public API, which has no argument for block sizes.

    Raises:
      NotImplementedError: the target is no TPU.
    """
    platform = current_target().platform
    if platform != "tpu":
        raise NotImplementedError(
            f"implementation 'tokamax' of the grouped matmul runs on TPU only, and this is {platform}: its kernel asks "
            "the device for its tiling; choose 'xla', or 'megablox' or 'mosaic' to interpret one"
        )
    out = tokamax_gmm().gmm(
        _pad_rows(lhs, tiles[0]),
        rhs,
        group_sizes,
        precision=_PRECISION,
        out_dtype=lhs.dtype,
        tiling=tiles,
        transpose_rhs=transpose_rhs,
    )
    return zero_unowned_rows(out[: lhs.shape[0]], group_sizes)


def tokamax_weight_gradient(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array, *, tiles: Blocks) -> jax.Array:
    """Tokamax' Mosaic kernel; arguments as of `megablox_weight_gradient`."""
    lhs, grad = _pad_rows(lhs, tiles.tile_m), _pad_rows(grad, tiles.tile_m)
    return tokamax_gmm().tgmm(
        lhs.swapaxes(0, 1), grad, group_sizes, precision=_PRECISION, out_dtype=grad.dtype, tiling=tuple(tiles)
    )


def ragged_dot_rows_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool) -> jax.Array:
    """`jax.lax.ragged_dot_general`, which only XLA:TPU lowers without a masked matmul for each group."""
    out = jax.lax.ragged_dot_general(lhs, rhs, group_sizes, _TRANSPOSED if transpose_rhs else _FORWARD)
    return zero_unowned_rows(out, group_sizes)


def ragged_dot_weight_gradient(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """`jax.lax.ragged_dot_general` with a ragged contracted dim."""
    lhs, grad = zero_unowned_rows(lhs, group_sizes), zero_unowned_rows(grad, group_sizes)
    return jax.lax.ragged_dot_general(lhs, grad, group_sizes, _CONTRACT_ROWS)


def zero_unowned_rows(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """X [M, N] with zeros after the last group's last row."""
    owned = jnp.arange(x.shape[0]) < jnp.sum(group_sizes)
    return jnp.where(owned[:, None], x, jnp.zeros_like(x))


def _pad_rows(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % multiple), (0, 0)))
