"""The grouped matmuls as PyTorch custom ops, with every implementation that they have."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from titan.kernels.grouped_matmul import libraries, pallas_tpu, xla
from titan.kernels.grouped_matmul.tiled_kernels import TILED_KERNELS, TiledKernels, blocks_for
from titan.kernels.grouped_matmul.vjp import grouped_matmul_backward, paired_grouped_matmul_backward
from titan.kernels.jax_op import jax_op

_AUTOMATIC = (0, 0, 0)


class Pair(NamedTuple):
    """Products [M, N] with the gate and the up weights."""

    gate: jax.Array
    up: jax.Array


@jax_op("titan::grouped_matmul", backward=grouped_matmul_backward, memory_kind="matmul")
def grouped_matmul_op(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    forward_tiles: tuple[int, ...] = _AUTOMATIC,
    dlhs_tiles: tuple[int, ...] = _AUTOMATIC,
    drhs_tiles: tuple[int, ...] = _AUTOMATIC,
) -> jax.Array:
    """Lhs [M, K] by rhs [G, K, N]: see `api.grouped_matmul`, which validates and calls it."""
    (out,) = xla.rows_matmul((lhs,), (rhs,), group_sizes)
    return out


@grouped_matmul_op.implementation("ragged_dot")
def _ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    forward_tiles: tuple[int, ...] = _AUTOMATIC,
    dlhs_tiles: tuple[int, ...] = _AUTOMATIC,
    drhs_tiles: tuple[int, ...] = _AUTOMATIC,
) -> jax.Array:
    return libraries.ragged_dot_rows_matmul(lhs, rhs, group_sizes, transpose_rhs=False)


def _product_by(kernels: TiledKernels) -> Callable[..., jax.Array]:
    def product(
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        forward_tiles: tuple[int, ...] = _AUTOMATIC,
        dlhs_tiles: tuple[int, ...] = _AUTOMATIC,
        drhs_tiles: tuple[int, ...] = _AUTOMATIC,
    ) -> jax.Array:
        blocks = blocks_for("forward", forward_tiles, lhs, rhs, num_weights=1)
        return kernels.rows_matmul(lhs, rhs, group_sizes, tiles=tuple(blocks), transpose_rhs=False)

    return product


for _kernels in TILED_KERNELS:
    grouped_matmul_op.implementation(_kernels.name, platforms=_kernels.platforms, pallas=_kernels.interpretable)(
        _product_by(_kernels)
    )


@jax_op("titan::paired_grouped_matmul", backward=paired_grouped_matmul_backward, memory_kind="matmul")
def paired_grouped_matmul_op(
    lhs: jax.Array,
    gate_weight: jax.Array,
    up_weight: jax.Array,
    group_sizes: jax.Array,
    *,
    forward_tiles: tuple[int, ...] = _AUTOMATIC,
    dlhs_tiles: tuple[int, ...] = _AUTOMATIC,
    drhs_tiles: tuple[int, ...] = _AUTOMATIC,
) -> Pair:
    """Lhs [M, K] by two weights [G, K, N]: see `api.paired_grouped_matmul`, which validates and calls it."""
    return Pair(*xla.rows_matmul((lhs,), (gate_weight, up_weight), group_sizes))


@paired_grouped_matmul_op.implementation("mosaic", platforms=("tpu",), pallas=True)
def _paired_mosaic(
    lhs: jax.Array,
    gate_weight: jax.Array,
    up_weight: jax.Array,
    group_sizes: jax.Array,
    *,
    forward_tiles: tuple[int, ...] = _AUTOMATIC,
    dlhs_tiles: tuple[int, ...] = _AUTOMATIC,
    drhs_tiles: tuple[int, ...] = _AUTOMATIC,
) -> Pair:
    weights = (gate_weight, up_weight)
    blocks = blocks_for("forward", forward_tiles, lhs, gate_weight, num_weights=2)
    return Pair(
        *pallas_tpu.rows_matmul(
            (lhs,), weights, group_sizes, tiles=tuple(blocks), transpose_weights=False, sum_products=False
        )
    )
