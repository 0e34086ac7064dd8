"""TPU kernel of the grouped matmul, in Pallas: one body for the forward pass and for the gradient of the rows."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from titan.kernels.grouped_matmul.work_units import row_units


def rows_matmul(
    lhs: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    *,
    tiles: tuple[int, int, int],
    transpose_weights: bool,
    sum_products: bool,
) -> tuple[jax.Array, ...]:
    """Each row times the weights of its group.

    The grid runs over column tiles, work units and contracted tiles. A row tile that several groups share is visited by
    each, and every visit writes its own rows; the output block stays in VMEM meanwhile.

    Args:
      lhs: one [M, C] for all weights, or one for each of them. A block of the former is read once for all.
      weights: each [G, C, N], or [G, N, C] with transpose_weights.
      group_sizes: int32 [G], adding up to at most M.
      tiles: rows, contracted columns and output columns in a block; the dims need not be multiples of them.
      transpose_weights: contract the last dim of the weights.
      sum_products: one result, the sum over the weights in one accumulator, instead of one for each.

    Returns:
      [M, N] each, in lhs' dtype; rows that no group owns are zero.
    """
    tile_m, tile_c, tile_n = tiles
    num_rows, num_contracted = lhs[0].shape
    num_groups = weights[0].shape[0]
    num_columns = weights[0].shape[1 if transpose_weights else 2]
    num_out = 1 if sum_products else len(weights)
    num_c_tiles = pl.cdiv(num_contracted, tile_c)
    units = row_units(group_sizes, num_rows=num_rows, tile_m=tile_m)

    def lhs_block(n, u, c, starts, group_ids, row_tiles):
        del n
        # A unit of unowned rows keeps the blocks of the unit before, so that nothing is read for it.
        last_owned_tile = jnp.maximum(starts[num_groups] - 1, 0) // tile_m
        unowned = group_ids[u] == num_groups
        return jnp.minimum(row_tiles[u], last_owned_tile), jnp.where(unowned, num_c_tiles - 1, c)

    def weight_block(n, u, c, starts, group_ids, row_tiles):
        del starts, row_tiles
        unowned = group_ids[u] == num_groups
        group = jnp.minimum(group_ids[u], num_groups - 1)
        c = jnp.where(unowned, num_c_tiles - 1, c)
        return (group, n, c) if transpose_weights else (group, c, n)

    def out_block(n, u, c, starts, group_ids, row_tiles):
        del c, starts, group_ids
        return row_tiles[u], n

    num_column_tiles = pl.cdiv(num_columns, tile_n)
    cost = pl.CostEstimate(
        flops=2 * num_rows * num_contracted * num_columns * len(weights),
        bytes_accessed=sum(x.nbytes for x in lhs) * num_column_tiles
        + sum(weight.nbytes for weight in weights)
        + num_out * num_rows * num_columns * lhs[0].dtype.itemsize,
        transcendentals=0,
    )
    weight_shape = (None, tile_n, tile_c) if transpose_weights else (None, tile_c, tile_n)
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            num_lhs=len(lhs),
            num_weights=len(weights),
            num_out=num_out,
            num_groups=num_groups,
            num_contracted=num_contracted,
            transpose_weights=transpose_weights,
        ),
        out_shape=[jax.ShapeDtypeStruct((num_rows, num_columns), lhs[0].dtype)] * num_out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_column_tiles, units.num_units, num_c_tiles),
            in_specs=[pl.BlockSpec((tile_m, tile_c), lhs_block)] * len(lhs)
            + [pl.BlockSpec(weight_shape, weight_block)] * len(weights),
            out_specs=[pl.BlockSpec((tile_m, tile_n), out_block)] * num_out,
            scratch_shapes=[pltpu.VMEM((tile_m, tile_n), jnp.float32)] * (num_out if num_c_tiles > 1 else 0),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=cost,
        name="grouped_matmul_transposed" if transpose_weights else "grouped_matmul",
    )(units.group_starts, units.group_ids, units.row_tiles, *lhs, *weights)
    return tuple(out)


def _kernel(
    starts,  # (G + 2,)
    group_ids,  # (U,)
    row_tiles,  # (U,)
    *refs,  # num_lhs x (tile_m, tile_c), num_weights x (tile_c, tile_n) or transposed, num_out x (tile_m, tile_n), sums
    num_lhs: int,
    num_weights: int,
    num_out: int,
    num_groups: int,
    num_contracted: int,
    transpose_weights: bool,
):
    lhs_refs, weight_refs, rest = refs[:num_lhs], refs[num_lhs : num_lhs + num_weights], refs[num_lhs + num_weights :]
    out_refs, acc_refs = rest[:num_out], rest[num_out:]
    tile_m, tile_c = lhs_refs[0].shape
    unit, c = pl.program_id(1), pl.program_id(2)
    last_c = pl.num_programs(2) - 1
    group = group_ids[unit]
    weight_dim = 1 if transpose_weights else 0

    owned = group < num_groups
    remainder = num_contracted % tile_c

    def products(num_valid: int) -> list[jax.Array]:
        """Of this step's blocks, of which the first num_valid contracted columns count; one for each result."""
        sums: list[jax.Array | None] = [None] * len(out_refs)
        for i, weight_ref in enumerate(weight_refs):
            lhs, weight = lhs_refs[i % num_lhs][...], weight_ref[...]
            if num_valid < tile_c:
                lhs, weight = _keep_first(lhs, num_valid, 1), _keep_first(weight, num_valid, weight_dim)
            product = jax.lax.dot_general(
                lhs, weight, (((1,), (weight_dim,)), ((), ())), preferred_element_type=jnp.float32
            )
            total = sums[i % len(sums)]
            sums[i % len(sums)] = product if total is None else total + product
        return sums

    def store(results: list[jax.Array]) -> None:
        for out_ref, result in zip(out_refs, results, strict=True):
            rows = row_tiles[unit] * tile_m + jax.lax.broadcasted_iota(jnp.int32, out_ref.shape, 0)
            mine = (rows >= starts[group]) & (rows < starts[group + 1])
            out_ref[...] = jnp.where(mine, result, out_ref[...].astype(jnp.float32)).astype(out_ref.dtype)

    if not acc_refs:  # the contracted dim is one block
        pl.when(owned)(lambda: store(products(remainder or tile_c)))
        pl.when(~owned)(lambda: store([jnp.zeros(out_ref.shape, jnp.float32) for out_ref in out_refs]))
        return

    @pl.when(c == 0)
    def _():
        for acc_ref in acc_refs:
            acc_ref[...] = jnp.zeros_like(acc_ref)

    def accumulate(num_valid: int) -> None:
        for acc_ref, product in zip(acc_refs, products(num_valid), strict=True):
            acc_ref[...] += product

    if remainder:
        pl.when(owned & (c < last_c))(lambda: accumulate(tile_c))
        pl.when(owned & (c == last_c))(lambda: accumulate(remainder))
    else:
        pl.when(owned)(lambda: accumulate(tile_c))
    pl.when(c == last_c)(lambda: store([acc_ref[...] for acc_ref in acc_refs]))


def _keep_first(block: jax.Array, count: int, dim: int) -> jax.Array:
    """Clears what a block that reaches beyond its array has there: anything, NaN included."""
    inside = jax.lax.broadcasted_iota(jnp.int32, block.shape, dim) < count
    return jnp.where(inside, block, jnp.zeros_like(block))
