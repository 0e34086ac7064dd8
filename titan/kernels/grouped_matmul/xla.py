"""The grouped matmul in plain JAX: loops over the groups and their row tiles.

`jax.lax.ragged_dot` would say it in one line, but XLA's CPU backend expands that to one masked matmul for every group,
G times the work and the memory. Here each group's weights are read once and only its own rows are multiplied; tiles
begin where the group begins, so at most one of a group's tiles is not full.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_TILE_M = 128


def rows_matmul(
    lhs: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    *,
    transpose_weights: bool = False,
    sum_products: bool = False,
) -> tuple[jax.Array, ...]:
    """Each row times the weights of its group.

    Args:
      lhs: one [M, C] for all weights, or one for each of them.
      weights: each [G, C, N], or [G, N, C] with transpose_weights.
      group_sizes: int [G].
      transpose_weights: contract the last dim of the weights.
      sum_products: one result, the sum over the weights, instead of one for each.

    Returns:
      [M, N] each, in lhs' dtype; rows that no group owns are zero.
    """
    num_rows = lhs[0].shape[0]
    num_columns = weights[0].shape[1 if transpose_weights else 2]
    dims = (((1,), (1 if transpose_weights else 0,)), ((), ()))
    tile_m = min(_TILE_M, num_rows)

    def group_step(group: jax.Array) -> Callable[..., Any]:
        of_group = [weight[group] for weight in weights]

        def tile_step(first_row: jax.Array, mine: jax.Array, outs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            rows = [lax.dynamic_slice_in_dim(x, first_row, tile_m) for x in lhs]
            products = [
                lax.dot_general(rows[i % len(rows)], weight, dims, preferred_element_type=jnp.float32)
                for i, weight in enumerate(of_group)
            ]
            if sum_products:
                products = [sum(products[1:], products[0])]
            old = [lax.dynamic_slice_in_dim(out, first_row, tile_m) for out in outs]
            new = [jnp.where(mine, y.astype(o.dtype), o) for y, o in zip(products, old, strict=True)]
            return tuple(lax.dynamic_update_slice_in_dim(o, y, first_row, 0) for o, y in zip(outs, new, strict=True))

        return tile_step

    num_out = 1 if sum_products else len(weights)
    outs = (jnp.zeros((num_rows, num_columns), lhs[0].dtype),) * num_out
    starts = _group_starts(group_sizes, num_rows)

    def body(group: jax.Array, outs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return _for_row_tiles(starts, group, num_rows, tile_m, group_step(group), outs)

    return lax.fori_loop(0, group_sizes.shape[0], body, outs)


def weight_gradients(lhs: jax.Array, grads: tuple[jax.Array, ...], group_sizes: jax.Array) -> tuple[jax.Array, ...]:
    """lhs^T times each of the gradients, over the rows of each group.

    Args:
      lhs: [M, K].
      grads: each [M, N].
      group_sizes: int [G].

    Returns:
      [G, K, N] each, in the gradients' dtype, summed in float32; zero for groups without rows.
    """
    num_rows, num_k = lhs.shape
    num_groups = group_sizes.shape[0]
    tile_m = min(_TILE_M, num_rows)
    starts = _group_starts(group_sizes, num_rows)

    def tile_step(first_row: jax.Array, mine: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        def load(x: jax.Array) -> jax.Array:  # other rows may hold NaN: both factors have to be cleared
            x = lax.dynamic_slice_in_dim(x, first_row, tile_m)
            return jnp.where(mine, x, jnp.zeros_like(x))

        rows = load(lhs)
        dims = (((0,), (0,)), ((), ()))
        return tuple(
            total + lax.dot_general(rows, load(grad), dims, preferred_element_type=jnp.float32)
            for total, grad in zip(sums, grads, strict=True)
        )

    def body(group: jax.Array, outs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        zeros = tuple(jnp.zeros((num_k, grad.shape[1]), jnp.float32) for grad in grads)
        sums = _for_row_tiles(starts, group, num_rows, tile_m, tile_step, zeros)
        return tuple(out.at[group].set(total.astype(out.dtype)) for out, total in zip(outs, sums, strict=True))

    outs = tuple(jnp.zeros((num_groups, num_k, grad.shape[1]), grad.dtype) for grad in grads)
    return lax.fori_loop(0, num_groups, body, outs)


def _group_starts(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), num_rows)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends])


def _for_row_tiles(
    starts: jax.Array, group: jax.Array, num_rows: int, tile_m: int, step: Callable[..., Any], init: Any
) -> Any:
    """Folds step(first_row, mine, carry) over the tiles of a group; `mine` [tile_m, 1] are the rows it owns."""
    start, end = starts[group], starts[group + 1]

    def body(tile: jax.Array, carry: Any) -> Any:
        begin = start + tile * tile_m
        first_row = jnp.minimum(begin, num_rows - tile_m)  # slices cannot reach beyond the array
        rows = first_row + jnp.arange(tile_m)
        return step(first_row, ((rows >= begin) & (rows < end))[:, None], carry)

    return lax.fori_loop(0, (end - start + tile_m - 1) // tile_m, body, init)
