"""Gradients of the grouped matmuls: rows by the transposed weights, weights by the transposed rows."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from titan.kernels.grouped_matmul import libraries, pallas_tpu, pallas_weight_gradient, xla
from titan.kernels.grouped_matmul.tiled_kernels import TILED_KERNELS, TiledKernels, blocks_for
from titan.kernels.jax_op import jax_op


class Gradients(NamedTuple):
    """Gradients of lhs [M, K] and rhs [G, K, N]."""

    lhs: jax.Array
    rhs: jax.Array


class PairedGradients(NamedTuple):
    """Gradients of lhs [M, K] and both weights [G, K, N]."""

    lhs: jax.Array
    gate_weight: jax.Array
    up_weight: jax.Array


@jax_op("titan::grouped_matmul_backward", backward=None)
def grouped_matmul_backward(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    grad_out: jax.Array,
    *,
    dlhs_tiles: tuple[int, ...],
    drhs_tiles: tuple[int, ...],
) -> Gradients:
    """Gradients of `titan::grouped_matmul`; rows that no group owns and groups without rows get zeros."""
    (dlhs,) = xla.rows_matmul((grad_out,), (rhs,), group_sizes, transpose_weights=True)
    (drhs,) = xla.weight_gradients(lhs, (grad_out,), group_sizes)
    return Gradients(dlhs, drhs)


@grouped_matmul_backward.implementation("ragged_dot")
def _ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    grad_out: jax.Array,
    *,
    dlhs_tiles: tuple[int, ...],
    drhs_tiles: tuple[int, ...],
) -> Gradients:
    dlhs = libraries.ragged_dot_rows_matmul(grad_out, rhs, group_sizes, transpose_rhs=True)
    return Gradients(dlhs, libraries.ragged_dot_weight_gradient(lhs, grad_out, group_sizes))


def _gradients_by(kernels: TiledKernels) -> Callable[..., Gradients]:
    def gradients(
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        grad_out: jax.Array,
        *,
        dlhs_tiles: tuple[int, ...],
        drhs_tiles: tuple[int, ...],
    ) -> Gradients:
        tile_m, tile_k, tile_n = blocks_for("dlhs", dlhs_tiles, lhs, rhs, num_weights=1)
        drhs_blocks = blocks_for("drhs", drhs_tiles, lhs, rhs, num_weights=1)
        dlhs = kernels.rows_matmul(grad_out, rhs, group_sizes, tiles=(tile_m, tile_n, tile_k), transpose_rhs=True)
        return Gradients(dlhs, kernels.weight_gradient(lhs, grad_out, group_sizes, tiles=drhs_blocks))

    return gradients


for _kernels in TILED_KERNELS:
    grouped_matmul_backward.implementation(_kernels.name, platforms=_kernels.platforms, pallas=_kernels.interpretable)(
        _gradients_by(_kernels)
    )


@jax_op("titan::paired_grouped_matmul_backward", backward=None)
def paired_grouped_matmul_backward(
    lhs: jax.Array,
    gate_weight: jax.Array,
    up_weight: jax.Array,
    group_sizes: jax.Array,
    grad_gate: jax.Array,
    grad_up: jax.Array,
    *,
    dlhs_tiles: tuple[int, ...],
    drhs_tiles: tuple[int, ...],
) -> PairedGradients:
    """Gradients of `titan::paired_grouped_matmul`: both products of lhs' gradient are summed in float32."""
    grads = (grad_gate, grad_up)
    (dlhs,) = xla.rows_matmul(grads, (gate_weight, up_weight), group_sizes, transpose_weights=True, sum_products=True)
    return PairedGradients(dlhs, *xla.weight_gradients(lhs, grads, group_sizes))


@paired_grouped_matmul_backward.implementation("mosaic", platforms=("tpu",), pallas=True)
def _paired_mosaic(
    lhs: jax.Array,
    gate_weight: jax.Array,
    up_weight: jax.Array,
    group_sizes: jax.Array,
    grad_gate: jax.Array,
    grad_up: jax.Array,
    *,
    dlhs_tiles: tuple[int, ...],
    drhs_tiles: tuple[int, ...],
) -> PairedGradients:
    grads = (grad_gate, grad_up)
    tile_m, tile_k, tile_n = blocks_for("dlhs", dlhs_tiles, lhs, gate_weight, num_weights=2)
    drhs_blocks = blocks_for("drhs", drhs_tiles, lhs, gate_weight, num_weights=2)
    (dlhs,) = pallas_tpu.rows_matmul(
        grads,
        (gate_weight, up_weight),
        group_sizes,
        tiles=(tile_m, tile_n, tile_k),
        transpose_weights=True,
        sum_products=True,
    )
    return PairedGradients(dlhs, *pallas_weight_gradient.weight_gradients(lhs, grads, group_sizes, tiles=drhs_blocks))
