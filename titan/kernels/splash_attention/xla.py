"""Attention in plain XLA operations with O(T) memory: for CPU, and wherever there is no kernel.

One head of one sequence at a time, a block of queries against the keys that the mask lets any of them see, all in
float32. Blocks and key ranges are static, so masked-out work is never done, and the backward pass computes the scores
again from the saved logsumexp (FlashAttention, https://arxiv.org/abs/2205.14135).

N query heads, K key/value heads, G = N / K query heads that share one, T tokens, D head dim.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from titan.kernels.splash_attention.mask import PositionMask

# Measured on CPU: a block's scores then stay in the cache, and the operations are large enough for all threads.
_QUERY_BLOCK = 256
_MAX_BLOCKS = 32  # each is a piece of program of its own


class Attention(NamedTuple):
    """Result of the forward pass: out [B, N, T, D] in q's dtype, logsumexp [B, N, T] in float32."""

    out: jax.Array
    logsumexp: jax.Array


class Gradients(NamedTuple):
    """Gradients of the inputs, with their shapes and dtypes."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class _Block(NamedTuple):
    """Queries `rows` against the keys `keys`; `visible` [rows, keys] is None if they all see each other."""

    rows: slice
    keys: slice
    visible: jax.Array | None


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    *,
    causal: bool,
    window: int,
    soft_cap: float,
    scale: float,
) -> Attention:
    """Forward pass; the arguments are those of `titan.kernels.splash_attention.api.splash_attention`."""
    mask = PositionMask(causal, window).within(q.shape[2])

    def head(q_TD: jax.Array, k_TD: jax.Array, v_TD: jax.Array, segments: tuple) -> Attention:
        q_TD = q_TD.astype(jnp.float32) * scale
        blocks = []
        for block in _blocks(mask, q_TD.shape[0], *segments):
            scores = _capped(_dot(q_TD[block.rows], k_TD[block.keys].T), soft_cap)
            if block.visible is not None:
                scores = jnp.where(block.visible, scores, -jnp.inf)
            highest = jnp.max(scores, axis=1, keepdims=True)
            highest = jnp.where(highest == -jnp.inf, 0.0, highest)  # a row that sees no key
            weights = jnp.exp(scores - highest)
            total = jnp.sum(weights, axis=1, keepdims=True)
            out = _dot(weights, v_TD[block.keys]) / jnp.where(total == 0.0, 1.0, total)
            blocks.append(Attention(out.astype(q.dtype), (highest + jnp.log(total))[:, 0]))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *blocks)

    def kv_head(q_GTD: jax.Array, k_TD: jax.Array, v_TD: jax.Array, segments: tuple) -> Attention:
        k_TD, v_TD = k_TD.astype(jnp.float32), v_TD.astype(jnp.float32)
        return lax.map(lambda q_TD: head(q_TD, k_TD, v_TD, segments), q_GTD)

    return _ungrouped(_over_kv_heads(kv_head, (_grouped(q, k), k, v), segment_ids, kv_segment_ids))


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    out: jax.Array,
    logsumexp: jax.Array,
    grad_out: jax.Array,
    *,
    causal: bool,
    window: int,
    soft_cap: float,
    scale: float,
) -> Gradients:
    """Backward pass, given inputs, results and the gradient of `out`."""
    mask = PositionMask(causal, window).within(q.shape[2])

    def head(sums, per_query_head, k_TD, v_TD, segments):
        q_TD, out_TD, grad_TD = (x.astype(jnp.float32) for x in per_query_head[:3])
        q_TD = q_TD * scale
        logsumexp_T1 = per_query_head[3][:, None]
        # The gradient of a softmax row is weights * (grad - sum(weights * grad)); this is that sum.
        mean_T1 = jnp.sum(out_TD * grad_TD, axis=1, keepdims=True)
        grad_k_DT, grad_v_DT = sums
        grad_q = []
        for block in _blocks(mask, q_TD.shape[0], *segments):
            rows, keys = block.rows, block.keys
            scores = _capped(_dot(q_TD[rows], k_TD[keys].T), soft_cap)
            exponents = scores - logsumexp_T1[rows]
            if block.visible is not None:
                exponents = jnp.where(block.visible, exponents, -jnp.inf)
            weights = jnp.exp(exponents)
            grad_scores = weights * (_dot(grad_TD[rows], v_TD[keys].T) - mean_T1[rows])
            if soft_cap:
                grad_scores = grad_scores * (1.0 - jnp.square(scores / soft_cap))
            grad_q.append((_dot(grad_scores, k_TD[keys]) * scale).astype(q.dtype))
            # Transposed, because XLA's CPU matmul is several times slower where the large operand must be transposed.
            grad_k_DT = grad_k_DT.at[:, keys].add(_dot(q_TD[rows].T, grad_scores))
            grad_v_DT = grad_v_DT.at[:, keys].add(_dot(grad_TD[rows].T, weights))
        return (grad_k_DT, grad_v_DT), jnp.concatenate(grad_q)

    def kv_head(q_GTD, out_GTD, grad_GTD, logsumexp_GT, k_TD, v_TD, segments):
        k_TD, v_TD = k_TD.astype(jnp.float32), v_TD.astype(jnp.float32)
        sums, grad_q_GTD = lax.scan(
            lambda sums, per_query_head: head(sums, per_query_head, k_TD, v_TD, segments),
            (jnp.zeros_like(k_TD.T), jnp.zeros_like(v_TD.T)),
            (q_GTD, out_GTD, grad_GTD, logsumexp_GT),
        )
        return grad_q_GTD, *(total_DT.T.astype(k.dtype) for total_DT in sums)

    per_query_head = [_grouped(x, k) for x in (q, out, grad_out, logsumexp)]
    grad_q, grad_k, grad_v = _over_kv_heads(kv_head, (*per_query_head, k, v), segment_ids, kv_segment_ids)
    return Gradients(_ungrouped(grad_q), grad_k, grad_v)


def _over_kv_heads(function, arrays, segment_ids, kv_segment_ids):
    """Calls `function(*arrays, (segment_ids, kv_segment_ids))` for each sequence and key/value head in turn."""
    if segment_ids is not None and kv_segment_ids is None:
        kv_segment_ids = segment_ids

    def sequence(arguments):
        arrays, segments = arguments
        return lax.map(lambda per_head: function(*per_head, segments), arrays)

    return lax.map(sequence, (arrays, (segment_ids, kv_segment_ids)))


def _blocks(
    mask: PositionMask, length: int, segment_ids: jax.Array | None, kv_segment_ids: jax.Array | None
) -> Iterator[_Block]:
    size = max(_QUERY_BLOCK, -(-length // _MAX_BLOCKS))
    for begin in range(0, length, size):
        end = min(length, begin + size)
        first_key, end_key = mask.key_range(begin, end, length)
        visible = mask.visible(jnp.arange(begin, end)[:, None], jnp.arange(first_key, end_key))
        if segment_ids is not None:
            same = segment_ids[begin:end, None] == kv_segment_ids[first_key:end_key]
            visible = same if visible is None else visible & same
        yield _Block(slice(begin, end), slice(first_key, end_key), visible)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _capped(scores: jax.Array, soft_cap: float) -> jax.Array:
    return soft_cap * jnp.tanh(scores / soft_cap) if soft_cap else scores


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """[B, N, ...] to [B, K, G, ...]."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _ungrouped(tree):
    """[B, K, G, ...] to [B, N, ...]."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), tree)
