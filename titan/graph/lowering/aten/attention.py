"""Scaled dot product attention as torch's fused CPU op, forward and backward.

The forward and the backward write the probabilities as the same expression of the same values, so that XLA merges them
in a program that holds both, and the backward costs no second softmax unless a memory policy separates the two.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from titan.graph.lowering.dtypes import cast
from titan.graph.lowering.table import LoweringContext, lowering

# Shape suffixes: B batch, K key heads, G query heads per key head, T queries, S keys, D head width.


def _grouped(query: jax.Array, num_key_heads: int) -> jax.Array:
    batch, num_heads, length, width = query.shape
    return query.reshape(batch, num_key_heads, num_heads // num_key_heads, length, width)


def _einsum(ctx: LoweringContext, formula: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jnp.einsum(formula, lhs, rhs, precision=ctx.matmul_precision, preferred_element_type=np.dtype(np.float32))


def _scores(
    ctx: LoweringContext,
    query_BKGTD: jax.Array,
    key_BKSD: jax.Array,
    is_causal: bool,
    attn_mask: jax.Array | None,  # broadcastable to (B, K * G, T, S)
    scale: float,
) -> jax.Array:
    scores_BKGTS = _einsum(ctx, "bkgtd,bksd->bkgts", query_BKGTD, key_BKSD) * np.float32(scale)
    if is_causal:
        rows = lax.broadcasted_iota(np.int32, scores_BKGTS.shape[-2:], 0)
        columns = lax.broadcasted_iota(np.int32, scores_BKGTS.shape[-2:], 1)
        scores_BKGTS = jnp.where(rows >= columns, scores_BKGTS, -jnp.inf)
    if attn_mask is not None:
        num_key_heads, group = scores_BKGTS.shape[1:3]
        mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
        heads = (num_key_heads, group) if mask.shape[1] > 1 else (1, 1)
        mask = mask.reshape(mask.shape[0], *heads, *mask.shape[2:])
        if mask.dtype == np.bool_:
            scores_BKGTS = jnp.where(mask, scores_BKGTS, -jnp.inf)
        else:
            scores_BKGTS = scores_BKGTS + cast(mask, scores_BKGTS.dtype)
    return scores_BKGTS


def _logsumexp(scores_BKGTS: jax.Array) -> jax.Array:
    """Over the keys; 0 for a query that may look at no key, which makes its probabilities exp(-inf - 0) = 0."""
    logsumexp_BKGT = jax.nn.logsumexp(scores_BKGTS, axis=-1)
    return jnp.where(logsumexp_BKGT == -jnp.inf, 0.0, logsumexp_BKGT)


def _probabilities(scores_BKGTS: jax.Array, logsumexp_BKGT: jax.Array) -> jax.Array:
    return jnp.exp(scores_BKGTS - logsumexp_BKGT[..., None])


def _check_dropout(dropout_p: float) -> None:
    if dropout_p != 0:
        raise NotImplementedError(f"attention dropout {dropout_p}: a captured step has no random numbers; set it to 0")


@lowering("aten._scaled_dot_product_flash_attention_for_cpu.default")
def _flash_attention(
    ctx: LoweringContext,
    query: jax.Array,  # (B, K * G, T, D)
    key: jax.Array,  # (B, K, S, D)
    value: jax.Array,  # (B, K, S, D)
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    _check_dropout(dropout_p)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores_BKGTS = _scores(ctx, _grouped(query, key.shape[1]), key, is_causal, attn_mask, scale)
    logsumexp_BKGT = _logsumexp(scores_BKGTS)
    probabilities = _probabilities(scores_BKGTS, logsumexp_BKGT)
    out = _einsum(ctx, "bkgts,bksd->bkgtd", cast(probabilities, value.dtype), value)
    return out.reshape(query.shape[:3] + value.shape[-1:]), logsumexp_BKGT.reshape(query.shape[:3])


@lowering("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def _flash_attention_backward(
    ctx: LoweringContext,
    grad_out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,  # (B, K * G, T)
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    _check_dropout(dropout_p)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    num_key_heads = key.shape[1]
    query_BKGTD, grad_BKGTD = _grouped(query, num_key_heads), _grouped(grad_out, num_key_heads)
    scores_BKGTS = _scores(ctx, query_BKGTD, key, is_causal, attn_mask, scale)
    logsumexp_BKGT = logsumexp.reshape(scores_BKGTS.shape[:-1])
    probabilities = _probabilities(scores_BKGTS, logsumexp_BKGT)
    grad_value = _einsum(ctx, "bkgts,bkgtd->bksd", cast(probabilities, value.dtype), grad_BKGTD)
    grad_probabilities = _einsum(ctx, "bkgtd,bksd->bkgts", grad_BKGTD, value)
    # sum_s p * dp = sum_d out * dout: one pass over D instead of S (Dao et al., FlashAttention, 2022, appendix B).
    wide = np.dtype(np.float32)
    delta = jnp.sum(cast(grad_BKGTD, wide) * cast(_grouped(out, num_key_heads), wide), axis=-1, keepdims=True)
    grad_scores = cast(probabilities * (grad_probabilities - delta) * np.float32(scale), query.dtype)
    grad_query = _einsum(ctx, "bkgts,bksd->bkgtd", grad_scores, key).reshape(query.shape)
    grad_key = _einsum(ctx, "bkgts,bkgtd->bksd", grad_scores, query_BKGTD)
    return grad_query, grad_key, grad_value
