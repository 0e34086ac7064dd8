"""The TPU kernels that a single grouped matmul can be computed with, which all take the same block sizes."""

import dataclasses
from collections.abc import Callable

import jax

from titan.kernels.grouped_matmul import libraries, pallas_tpu, pallas_weight_gradient
from titan.kernels.grouped_matmul.tiles import Blocks, Kernel, Problem, resolve


@dataclasses.dataclass(frozen=True)
class TiledKernels:
    """A pair of kernels.

    Attributes:
      name: the implementation that they make.
      rows_matmul: (lhs, rhs, group_sizes, *, tiles, transpose_rhs) -> rows [M, C] by [G, C, N], or [G, N, C]
        transposed; tiles are rows, contracted columns, output columns.
      weight_gradient: (lhs, grad, group_sizes, *, tiles) -> lhs^T grad of each group, [G, K, N].
      platforms: where it is chosen unasked.
      interpretable: whether other platforms can interpret it.
    """

    name: str
    rows_matmul: Callable[..., jax.Array]
    weight_gradient: Callable[..., jax.Array]
    platforms: tuple[str, ...] = ()
    interpretable: bool = True


def blocks_for(
    kernel: Kernel, given: tuple[int, ...], lhs: jax.Array, weight: jax.Array, *, num_weights: int
) -> Blocks:
    """The blocks to run a kernel with, from the arrays' shapes; see `tiles.resolve`."""
    num_groups, num_k, num_n = weight.shape
    problem = Problem(lhs.shape[0], num_k, num_n, num_groups, num_weights, lhs.dtype.itemsize)
    return resolve(kernel, given, problem)


def _mosaic_rows_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, tiles: tuple[int, int, int], transpose_rhs: bool
) -> jax.Array:
    (out,) = pallas_tpu.rows_matmul(
        (lhs,), (rhs,), group_sizes, tiles=tiles, transpose_weights=transpose_rhs, sum_products=False
    )
    return out


def _mosaic_weight_gradient(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array, *, tiles: Blocks) -> jax.Array:
    (out,) = pallas_weight_gradient.weight_gradients(lhs, (grad,), group_sizes, tiles=tiles)
    return out


TILED_KERNELS = (
    TiledKernels("megablox", libraries.megablox_rows_matmul, libraries.megablox_weight_gradient, platforms=("tpu",)),
    TiledKernels("tokamax", libraries.tokamax_rows_matmul, libraries.tokamax_weight_gradient, interpretable=False),
    TiledKernels("mosaic", _mosaic_rows_matmul, _mosaic_weight_gradient),
)
"""JAX's own are the default: they are the ones that others run on hardware."""
