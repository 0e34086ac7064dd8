"""TPU kernel of the route-score backward, in Pallas: both gradients from one read of expert_out and the gradient."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from titan.kernels.route_scores.tiles import RouteScoreTiles


def gradients(
    expert_out: jax.Array, scores: jax.Array, grad_out: jax.Array, *, tiles: RouteScoreTiles
) -> tuple[jax.Array, jax.Array]:
    """Gradients of expert_out [M, E] and scores [M] in their dtypes; the latter is summed in float32.

    The grid runs over row blocks and column blocks; the sums of a row block stay in VMEM over its column blocks.
    """
    num_rows, num_columns = expert_out.shape
    block_m, block_e = tiles.block_m, tiles.block_e
    block = pl.BlockSpec((block_m, block_e), lambda m, e: (m, e))
    row = pl.BlockSpec((1, block_m), lambda m, e: (0, m))  # as one row, M floats take M words and not 128 M
    grad_expert_out, grad_scores = pl.pallas_call(
        functools.partial(_kernel, num_columns=num_columns),
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, num_columns), expert_out.dtype),
            jax.ShapeDtypeStruct((1, num_rows), jnp.float32),
        ],
        grid=(pl.cdiv(num_rows, block_m), pl.cdiv(num_columns, block_e)),
        in_specs=[block, row, block],
        out_specs=[block, row],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=3 * expert_out.size,
            bytes_accessed=2 * expert_out.nbytes + grad_out.nbytes + 8 * num_rows,
            transcendentals=0,
        ),
        name="route_scores_backward",
    )(expert_out, scores.astype(jnp.float32)[None], grad_out)
    return grad_expert_out, grad_scores[0].astype(scores.dtype)


def _kernel(
    expert_out_ref,  # (block_m, block_e)
    scores_ref,  # (1, block_m)
    grad_out_ref,  # (block_m, block_e)
    grad_expert_out_ref,  # (block_m, block_e)
    grad_scores_ref,  # (1, block_m)
    *,
    num_columns: int,
):
    e = pl.program_id(1)
    block_m, block_e = expert_out_ref.shape
    grad_out = grad_out_ref[...].astype(jnp.float32)
    grad_expert_out_ref[...] = (grad_out * scores_ref[...].reshape(block_m, 1)).astype(grad_expert_out_ref.dtype)
    products = grad_out * expert_out_ref[...].astype(jnp.float32)
    if num_columns % block_e:  # what lies beyond the last column is undefined
        columns = e * block_e + jax.lax.broadcasted_iota(jnp.int32, products.shape, 1)
        products = jnp.where(columns < num_columns, products, 0.0)

    @pl.when(e == 0)
    def _():
        grad_scores_ref[...] = jnp.zeros_like(grad_scores_ref)

    grad_scores_ref[...] += jnp.sum(products, axis=1).reshape(1, block_m)
