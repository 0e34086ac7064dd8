"""The statistics of the logits as a Mosaic kernel: the logits exist block by block in VMEM and never in HBM.

Grid: token blocks, vocabulary blocks, blocks of the embedding dim, the last one fastest. The products of a block of
logits are added up in VMEM; after its last embedding block they are scaled and capped, and reduced into each token's
running maximum, sum and label logit, which stay in VMEM over all vocabulary blocks.

The block is held transposed, [vocabulary, tokens]: reductions over the vocabulary are then sums of vector registers
rather than within them, and all that belongs to tokens is a row.

The backward pass keeps XLA's matmuls. A kernel of its own would have to compute the logits twice (once for each
gradient, five matrix multiplications instead of four), or hold blocks of all of the embedding dim in VMEM, float32
gradients included, which 16384 does not allow.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from titan.kernels.fused_linear_cross_entropy.logits import cap, contract
from titan.kernels.fused_linear_cross_entropy.tiles import EPILOGUE_ROWS, check_blocks, tiles_for
from titan.kernels.fused_linear_cross_entropy.xla import Statistics, logits_statistics
from titan.kernels.target import current_target


@logits_statistics.implementation("mosaic", platforms=("tpu",), pallas=True)
def logits_statistics_mosaic(
    hidden_ME: jax.Array,
    weight_VE: jax.Array,
    labels_M: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    vocab_tile: int,
    block_tokens: int,
    block_vocab: int,
    block_embed: int,
) -> Statistics:
    """`logits_statistics` by the kernel.

    Raises:
      ValueError: block_embed neither divides the embedding dim nor is that dim.
      titan.kernels.vmem.VmemError: the blocks do not fit the VMEM.
    """
    (num_tokens, embed_dim), vocab = hidden_ME.shape, weight_VE.shape[0]
    tiles = tiles_for(hidden_ME, weight_VE, block_tokens=block_tokens, block_vocab=block_vocab, block_embed=block_embed)
    itemsize = hidden_ME.dtype.itemsize
    check_blocks(tiles, embed_dim=embed_dim, itemsize=itemsize, generation=current_target().generation)
    block_m, block_v, block_e = tiles.block_tokens, tiles.block_vocab, tiles.block_embed
    grid = (pl.cdiv(num_tokens, block_m), pl.cdiv(vocab, block_v), pl.cdiv(embed_dim, block_e))
    # The last vocabulary block has rows past the end, which must not pass for a label.
    labels_1M = jnp.where(labels_M < vocab, labels_M, -1)[None]
    row = pl.BlockSpec((1, block_m), lambda m, v, e: (0, m))
    row_shape = jax.ShapeDtypeStruct((1, num_tokens), jnp.float32)
    logsumexp_1M, label_logit_1M = pl.pallas_call(
        functools.partial(_statistics_kernel, vocab=vocab, scale=scale, soft_cap=soft_cap),
        grid=grid,
        in_specs=[
            row,
            pl.BlockSpec((block_m, block_e), lambda m, v, e: (m, e)),
            pl.BlockSpec((block_v, block_e), lambda m, v, e: (v, e)),
        ],
        out_specs=[row, row],
        out_shape=[row_shape, row_shape],
        scratch_shapes=[
            pltpu.VMEM((block_v, block_m), jnp.float32),
            *(pltpu.VMEM((1, block_m), jnp.float32) for _ in range(3)),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_tokens * vocab * embed_dim,
            transcendentals=num_tokens * vocab * (2 if soft_cap else 1),
            bytes_accessed=itemsize * embed_dim * (grid[1] * num_tokens + grid[0] * vocab),
        ),
        name="linear_cross_entropy_statistics",
    )(labels_1M, hidden_ME, weight_VE)
    return Statistics(logsumexp_1M[0], label_logit_1M[0])


def _statistics_kernel(
    labels_ref,  # (1, block_m), int32
    hidden_ref,  # (block_m, block_e)
    weight_ref,  # (block_v, block_e)
    logsumexp_ref,  # (1, block_m), written once
    label_logit_ref,  # (1, block_m), written once
    scores_ref,  # (block_v, block_m), products added up over the embedding blocks
    max_ref,  # (1, block_m), of the logits so far
    sum_ref,  # (1, block_m), of the exponentials of logits less their maximum
    hit_ref,  # (1, block_m), the label's logit if it was met
    *,
    vocab: int,
    scale: float,
    soft_cap: float,
):
    vocab_block, embed_block = pl.program_id(1), pl.program_id(2)
    block_v = scores_ref.shape[0]

    @pl.when((vocab_block == 0) & (embed_block == 0))
    def _start_tokens():
        max_ref[...] = jnp.full(max_ref.shape, -jnp.inf, jnp.float32)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        hit_ref[...] = jnp.zeros_like(hit_ref)

    @pl.when(embed_block == 0)
    def _start_block():
        scores_ref[...] = contract(weight_ref[...], hidden_ref[...], 1, 1)

    @pl.when(embed_block > 0)
    def _add():
        scores_ref[...] += contract(weight_ref[...], hidden_ref[...], 1, 1)

    @pl.when(embed_block == pl.num_programs(2) - 1)
    def _reduce_block():
        labels = labels_ref[...]

        def reduce_rows(i, carry):
            running_max, running_sum, hit = carry
            start = pl.multiple_of(i * EPILOGUE_ROWS, EPILOGUE_ROWS)
            logits = cap(scores_ref[pl.ds(start, EPILOGUE_ROWS), :], scale, soft_cap)
            entries = vocab_block * block_v + start + lax.broadcasted_iota(jnp.int32, logits.shape, 0)
            if vocab % block_v:
                logits = jnp.where(entries < vocab, logits, -jnp.inf)
            new_max = jnp.maximum(running_max, logits.max(0, keepdims=True))
            exponentials = jnp.exp(logits - new_max).sum(0, keepdims=True)
            hit += jnp.where(entries == labels, logits, 0.0).sum(0, keepdims=True)
            return new_max, running_sum * jnp.exp(running_max - new_max) + exponentials, hit

        max_ref[...], sum_ref[...], hit_ref[...] = lax.fori_loop(
            0, block_v // EPILOGUE_ROWS, reduce_rows, (max_ref[...], sum_ref[...], hit_ref[...])
        )

    @pl.when((vocab_block == pl.num_programs(1) - 1) & (embed_block == pl.num_programs(2) - 1))
    def _finish_tokens():
        logsumexp_ref[...] = max_ref[...] + jnp.log(sum_ref[...])
        label_logit_ref[...] = hit_ref[...]
