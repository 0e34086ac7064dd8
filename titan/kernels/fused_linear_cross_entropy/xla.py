"""Vocabulary tiles: the statistics of the logits that the loss needs, in plain XLA.

The loss needs two numbers of each token's logits: their logsumexp and the label's logit. They are gathered vocabulary
tile by vocabulary tile with a running maximum and sum (the online softmax of Milakov and Gimelshein, arXiv 1805.02867),
so that only one tile's logits exist at a time.

Everything else of the loss (ignored tokens, weights, z-loss) is a function of these two numbers, outside of the op. A
vocabulary split over devices (`vocab_shard`) is too: the statistics of shards combine by a logsumexp and a sum, a label
of another shard has the logit 0, and the gradients of a shard's statistics are those of its part of the logits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from titan.kernels.fused_linear_cross_entropy.logits import cap, contract, for_each_tile, is_label
from titan.kernels.fused_linear_cross_entropy.tiles import tiles_for
from titan.kernels.fused_linear_cross_entropy.vjp import logits_statistics_backward
from titan.kernels.jax_op import jax_op


class Statistics(NamedTuple):
    """What the loss needs of the logits of each token, float32 [M]."""

    logsumexp_M: jax.Array
    label_logit_M: jax.Array


@jax_op("titan::linear_cross_entropy_statistics", backward=logits_statistics_backward)
def logits_statistics(
    hidden_ME: jax.Array,
    weight_VE: jax.Array,
    labels_M: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    vocab_tile: int = 0,
    block_tokens: int = 0,
    block_vocab: int = 0,
    block_embed: int = 0,
) -> Statistics:
    """The logsumexp of each token's logits and its label's logit, which is 0 for a label outside of [0, V).

    Args:
      hidden_ME, weight_VE: of one dtype, float32 or bfloat16; products are accumulated in float32.
      labels_M: int32.
      scale, soft_cap: see `fused_linear_cross_entropy`.
      vocab_tile: vocabulary entries at a time; 0 for the default.
      block_tokens, block_vocab, block_embed: blocks of the implementation "mosaic"; 0 for the defaults.
    """
    num_tokens, vocab = hidden_ME.shape[0], weight_VE.shape[0]
    tile = tiles_for(hidden_ME, weight_VE, vocab_tile=vocab_tile).vocab_tile

    def add_tile(start: jax.Array | int, size: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        max_M, sum_M, label_logit_M = carry
        tile_vE = lax.dynamic_slice_in_dim(weight_VE, start, size)
        logits_Mv = cap(contract(hidden_ME, tile_vE, 1, 1), scale, soft_cap)
        new_max_M = jnp.maximum(max_M, logits_Mv.max(1))
        sum_M = sum_M * jnp.exp(max_M - new_max_M) + jnp.exp(logits_Mv - new_max_M[:, None]).sum(1)
        label_logit_M = label_logit_M + jnp.where(is_label(labels_M, start, size), logits_Mv, 0.0).sum(1)
        return new_max_M, sum_M, label_logit_M

    nothing = jnp.full(num_tokens, -jnp.inf), jnp.zeros(num_tokens), jnp.zeros(num_tokens)
    max_M, sum_M, label_logit_M = for_each_tile(vocab, tile, add_tile, nothing)
    return Statistics(max_M + jnp.log(sum_M), label_logit_M)
