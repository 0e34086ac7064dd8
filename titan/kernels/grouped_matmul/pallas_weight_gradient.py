"""TPU kernel of the weight gradients of a grouped matmul: K-tiled, for one or two weights that share their rows."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from titan.kernels.grouped_matmul.tiles import Blocks
from titan.kernels.grouped_matmul.work_units import group_units


def weight_gradients(
    lhs: jax.Array,
    grads: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    *,
    tiles: Blocks,
) -> tuple[jax.Array, ...]:
    """lhs^T times each of the gradients, over the rows of each group.

    The grid runs over column tiles, K tiles and work units. A block of lhs is read once for all gradients; the sums of
    a group stay in float32 in VMEM until the group changes.

    Args:
      lhs: [M, K].
      grads: each [M, N].
      group_sizes: int32 [G], adding up to at most M.
      tiles: block sizes; the dims need not be multiples of them.

    Returns:
      [G, K, N] each, in the gradients' dtype; zero for groups without rows.
    """
    num_rows, num_k = lhs.shape
    num_n = grads[0].shape[1]
    num_groups = group_sizes.shape[0]
    tile_m, tile_k, tile_n = tiles
    units = group_units(group_sizes, num_rows=num_rows, tile_m=tile_m)

    def lhs_block(n, k, u, starts, group_ids, row_tiles):
        del n, starts, group_ids
        return row_tiles[u], k

    def grad_block(n, k, u, starts, group_ids, row_tiles):
        del k, starts, group_ids
        return row_tiles[u], n

    def out_block(n, k, u, starts, group_ids, row_tiles):
        del starts, row_tiles
        return group_ids[u], k, n

    tiles_k, tiles_n = pl.cdiv(num_k, tile_k), pl.cdiv(num_n, tile_n)
    cost = pl.CostEstimate(
        flops=2 * num_rows * num_k * num_n * len(grads),
        bytes_accessed=lhs.nbytes * tiles_n
        + sum(grad.nbytes * tiles_k + num_groups * num_k * num_n * grad.dtype.itemsize for grad in grads),
        transcendentals=0,
    )
    out = pl.pallas_call(
        functools.partial(_kernel, num_grads=len(grads)),
        out_shape=[jax.ShapeDtypeStruct((num_groups, num_k, num_n), grad.dtype) for grad in grads],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(tiles_n, tiles_k, units.num_units),
            in_specs=[pl.BlockSpec((tile_m, tile_k), lhs_block)]
            + [pl.BlockSpec((tile_m, tile_n), grad_block)] * len(grads),
            out_specs=[pl.BlockSpec((None, tile_k, tile_n), out_block)] * len(grads),
            scratch_shapes=[pltpu.VMEM((tile_k, tile_n), jnp.float32)] * len(grads),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=cost,
        name="grouped_matmul_weight_gradient",
    )(units.group_starts, units.group_ids, units.row_tiles, lhs, *grads)
    return tuple(out)


def _kernel(
    starts,  # (G + 1,)
    group_ids,  # (U,)
    row_tiles,  # (U,)
    lhs_ref,  # (tile_m, tile_k)
    *refs,  # num_grads x (tile_m, tile_n), then as many outputs and accumulators (tile_k, tile_n)
    num_grads: int,
):
    grad_refs, out_refs, acc_refs = refs[:num_grads], refs[num_grads : 2 * num_grads], refs[2 * num_grads :]
    tile_m = lhs_ref.shape[0]
    unit = pl.program_id(2)
    last_unit = pl.num_programs(2) - 1
    group = group_ids[unit]
    is_first = (unit == 0) | (group_ids[jnp.maximum(unit - 1, 0)] != group)
    is_last = (unit == last_unit) | (group_ids[jnp.minimum(unit + 1, last_unit)] != group)
    tile_start = row_tiles[unit] * tile_m
    first_row = jnp.maximum(starts[group] - tile_start, 0)
    end_row = jnp.minimum(starts[group + 1] - tile_start, tile_m)

    @pl.when(is_first)
    def _():
        for acc_ref in acc_refs:
            acc_ref[...] = jnp.zeros_like(acc_ref)

    def load_mine(ref):  # rows that no group owns may hold NaN: both factors have to be cleared
        rows = jax.lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        return jnp.where((rows >= first_row) & (rows < end_row), ref[...], jnp.zeros(ref.shape, ref.dtype))

    @pl.when(end_row > first_row)
    def _():
        lhs = load_mine(lhs_ref)
        for grad_ref, acc_ref in zip(grad_refs, acc_refs, strict=True):
            acc_ref[...] += jax.lax.dot_general(
                lhs, load_mine(grad_ref), (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )

    @pl.when(is_last)
    def _():
        for out_ref, acc_ref in zip(out_refs, acc_refs, strict=True):
            out_ref[...] = acc_ref[...].astype(out_ref.dtype)
