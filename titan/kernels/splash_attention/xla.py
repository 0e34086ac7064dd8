"""Attention in plain XLA operations with O(T) memory: for CPU, and wherever there is no kernel.

One head at a time, a block of queries against a block of keys, in float32. Blocks that the mask empties are not
visited; softmax runs along with its maximum and sum, and the backward pass computes the scores again from the saved
logsumexp (FlashAttention, https://arxiv.org/abs/2205.14135). On CPU the scores of a pair of blocks stay in the cache.

N query heads, K key/value heads, G = N / K query heads that share one, T queries in C chunks of neighbours, L keys, D
head dim; I blocks of P queries, a number of them for each chunk, and J blocks of S keys; I P is at least T, J S at
least L. C is 1 and L is T where queries and keys are the same tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from titan.kernels.splash_attention.mask import PositionMask

# Largest blocks; measured on CPU.
_QUERY_BLOCK = 256
_KEY_BLOCK = 512


class Attention(NamedTuple):
    """Result of the forward pass: out [B, N, T, D] in q's dtype, logsumexp [B, N, T] in float32."""

    out: jax.Array
    logsumexp: jax.Array


class Gradients(NamedTuple):
    """Gradients of the inputs, with their shapes and dtypes."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    query_starts: jax.Array | None = None,
    *,
    causal: bool,
    window: int,
    soft_cap: float,
    scale: float,
) -> Attention:
    """Forward pass; the arguments are those of `titan.kernels.splash_attention.api.splash_attention`."""
    plan = _Plan(PositionMask(causal, window), q.shape[2], k.shape[2], query_starts)

    def kv_head(q_GTD, k_LD, v_LD, segments) -> Attention:
        k_JSD, v_JSD = plan.key_blocks(k_LD), plan.key_blocks(v_LD)

        def query_block(arguments) -> Attention:
            i, begin, end, q_PD = arguments

            def step(j, state):
                highest_P1, total_P1, out_PD = state
                scores_PS = _capped(_dot(q_PD, k_JSD[j].T), soft_cap)
                scores_PS = plan.masked(scores_PS, i, j, segments)
                # Finite, so that a row that sees no key yet gets weights of 0 and not NaN.
                new_highest_P1 = jnp.maximum(highest_P1, jnp.max(scores_PS, axis=1, keepdims=True))
                weights_PS = jnp.exp(scores_PS - new_highest_P1)
                decay_P1 = jnp.exp(highest_P1 - new_highest_P1)
                return (
                    new_highest_P1,
                    total_P1 * decay_P1 + jnp.sum(weights_PS, axis=1, keepdims=True),
                    out_PD * decay_P1 + _dot(weights_PS, v_JSD[j]),
                )

            zeros_P1 = jnp.zeros((q_PD.shape[0], 1))
            state = (zeros_P1 + float(np.finfo(np.float32).min), zeros_P1, jnp.zeros_like(q_PD))
            highest_P1, total_P1, out_PD = lax.fori_loop(begin, end, step, state)
            out_PD = out_PD / jnp.where(total_P1 == 0.0, 1.0, total_P1)
            return Attention(out_PD.astype(q.dtype), (highest_P1 + jnp.log(total_P1))[:, 0])

        group, num_blocks = q_GTD.shape[0], plan.num_query_blocks
        per_block = (np.arange(num_blocks), plan.first_key_block, plan.end_key_block)
        q_blocks = plan.query_blocks(q_GTD.astype(jnp.float32) * scale)
        blocks = lax.map(query_block, (*(jnp.tile(x, group) for x in per_block), q_blocks))
        return jax.tree.map(lambda x: plan.queries(x, group), blocks)

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
    query_starts: jax.Array | None = None,
    *,
    causal: bool,
    window: int,
    soft_cap: float,
    scale: float,
) -> Gradients:
    """Backward pass, given inputs, results and the gradient of `out`."""
    plan = _Plan(PositionMask(causal, window), q.shape[2], k.shape[2], query_starts)

    def kv_head(q_GTD, out_GTD, grad_GTD, logsumexp_GT, k_LD, v_LD, segments) -> Gradients:
        group = q_GTD.shape[0]
        out_GTD, grad_GTD = out_GTD.astype(jnp.float32), grad_GTD.astype(jnp.float32)
        # The gradient of a softmax row is weights * (grad - sum(weights * grad)); this is that sum.
        mean_GT = jnp.sum(out_GTD * grad_GTD, axis=2)
        q_blocks = plan.query_blocks(q_GTD.astype(jnp.float32) * scale)
        grad_blocks, mean_blocks, logsumexp_blocks = map(plan.query_blocks, (grad_GTD, mean_GT, logsumexp_GT))

        def key_block(grad_q_blocks, arguments):
            j, begin, end, k_SD, v_SD = arguments

            def step(g, i, state):
                grad_q_blocks, grad_k_DS, grad_v_DS = state
                block = g * plan.num_query_blocks + i
                q_PD, grad_PD = q_blocks[block], grad_blocks[block]
                scores_PS = _capped(_dot(q_PD, k_SD.T), soft_cap)
                exponents_PS = plan.masked(scores_PS - logsumexp_blocks[block][:, None], i, j, segments)
                weights_PS = jnp.exp(exponents_PS)
                grad_scores_PS = weights_PS * (_dot(grad_PD, v_SD.T) - mean_blocks[block][:, None])
                if soft_cap:
                    grad_scores_PS = grad_scores_PS * (1.0 - jnp.square(scores_PS / soft_cap))
                # Transposed sums, because XLA's CPU matmul is slow where the large operand must be transposed.
                return (
                    grad_q_blocks.at[block].add(_dot(grad_scores_PS, k_SD)),
                    grad_k_DS + _dot(q_PD.T, grad_scores_PS),
                    grad_v_DS + _dot(grad_PD.T, weights_PS),
                )

            def query_head(g, state):
                return lax.fori_loop(begin, end, lambda i, state: step(g, i, state), state)

            state = (grad_q_blocks, jnp.zeros_like(k_SD.T), jnp.zeros_like(v_SD.T))
            grad_q_blocks, grad_k_DS, grad_v_DS = lax.fori_loop(0, group, query_head, state)
            return grad_q_blocks, (grad_k_DS.T, grad_v_DS.T)

        per_block = (np.arange(plan.num_key_blocks), plan.first_query_block, plan.end_query_block)
        keys_and_values = (plan.key_blocks(k_LD), plan.key_blocks(v_LD))
        grad_q_blocks, sums = lax.scan(key_block, jnp.zeros_like(q_blocks), (*per_block, *keys_and_values))
        grad_k_LD, grad_v_LD = (plan.keys(x).astype(k.dtype) for x in sums)
        return Gradients((plan.queries(grad_q_blocks, group) * scale).astype(q.dtype), grad_k_LD, grad_v_LD)

    per_query_head = [_grouped(x, k) for x in (q, out, grad_out, logsumexp)]
    gradients = _over_kv_heads(kv_head, (*per_query_head, k, v), segment_ids, kv_segment_ids)
    return gradients._replace(q=_ungrouped(gradients.q))


class _Plan:
    """How queries and keys are cut into blocks, and which pairs of them the mask lets through at all.

    Query block i sees the key blocks `first_key_block[i]` to `end_key_block[i]`, exclusive; key block j is seen by no
    query blocks but `first_query_block[j]` to `end_query_block[j]`. Numbers, unless the queries' place in the sequence
    is known at run time alone.
    """

    def __init__(self, mask: PositionMask, num_queries: int, num_keys: int, query_starts: jax.Array | None):
        self.mask, self.num_queries, self.num_keys = mask.within(num_keys), num_queries, num_keys
        starts_C = np.zeros(1, np.int32) if query_starts is None else query_starts
        self.num_chunks = starts_C.shape[0]
        self.chunk_size = num_queries // self.num_chunks
        blocks_per_chunk, self.query_size = _even_blocks(self.chunk_size, _QUERY_BLOCK)
        self.num_query_blocks = self.num_chunks * blocks_per_chunk
        self.num_key_blocks, self.key_size = _even_blocks(num_keys, _KEY_BLOCK)
        offsets = np.arange(0, self.chunk_size, self.query_size, dtype=np.int32)
        ends = np.minimum(offsets + self.query_size, self.chunk_size)
        self.first_query = (starts_C[:, None] + offsets).reshape(-1)  # [I], among all tokens
        end_query = (starts_C[:, None] + ends).reshape(-1)
        # Where a block begins among the queries that there are.
        self.row = (np.arange(self.num_chunks)[:, None] * self.chunk_size + offsets).reshape(-1)
        first, end = self.mask.key_range(self.first_query, end_query, num_keys)
        self.first_key_block = first // self.key_size
        self.end_key_block = -(-end // self.key_size)
        j = np.arange(self.num_key_blocks)
        seen_IJ = (self.first_key_block[:, None] <= j) & (j < self.end_key_block[:, None])
        is_seen_J = seen_IJ.any(axis=0)  # not all are, if not all queries are here
        self.first_query_block = seen_IJ.argmax(axis=0) * is_seen_J
        self.end_query_block = (self.num_query_blocks - seen_IJ[::-1].argmax(axis=0)) * is_seen_J

    def query_blocks(self, x: jax.Array) -> jax.Array:
        """[G, T, ...] to [G I, P, ...], the end of each chunk padded with zeros."""
        x = x.reshape(-1, self.chunk_size, *x.shape[2:])
        padded = self.num_query_blocks // self.num_chunks * self.query_size
        x = jnp.pad(x, [(0, 0), (0, padded - self.chunk_size), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(-1, self.query_size, *x.shape[2:])

    def queries(self, x: jax.Array, group: int) -> jax.Array:
        """[G I, P, ...] to [G, T, ...]: undoes `query_blocks`."""
        x = x.reshape(group * self.num_chunks, -1, *x.shape[2:])[:, : self.chunk_size]
        return x.reshape(group, self.num_queries, *x.shape[2:])

    def key_blocks(self, x_LD: jax.Array) -> jax.Array:
        """[L, D] to [J, S, D] in float32, the end padded with zeros."""
        padded = self.num_key_blocks * self.key_size
        x_LD = jnp.pad(x_LD.astype(jnp.float32), ((0, padded - self.num_keys), (0, 0)))
        return x_LD.reshape(-1, self.key_size, x_LD.shape[1])

    def keys(self, x_JSD: jax.Array) -> jax.Array:
        """[J, S, D] to [L, D]: undoes `key_blocks`."""
        return x_JSD.reshape(-1, x_JSD.shape[2])[: self.num_keys]

    def masked(self, scores_PS: jax.Array, i: jax.Array, j: jax.Array, segments) -> jax.Array:
        """Scores of query block i and key block j, with -inf where a query does not see a key."""
        rows_P1 = jnp.arange(scores_PS.shape[0])[:, None]
        queries_P1 = jnp.asarray(self.first_query)[i] + rows_P1
        keys_S = j * self.key_size + jnp.arange(self.key_size)
        conditions = [self.mask.visible(queries_P1, keys_S)]
        if self.num_key_blocks * self.key_size > self.num_keys and not self.mask.causal:
            conditions.append(keys_S < self.num_keys)
        if segments is not None:
            ids_T, kv_ids_L = segments
            ids_P1 = jnp.take(ids_T, jnp.asarray(self.row)[i] + rows_P1, mode="clip")
            conditions.append(ids_P1 == jnp.take(kv_ids_L, keys_S, mode="clip"))
        for visible in conditions:
            if visible is not None:
                scores_PS = jnp.where(visible, scores_PS, -jnp.inf)
        return scores_PS


def _even_blocks(length: int, largest: int) -> tuple[int, int]:
    """Number and size of the blocks, of one size, that cover `length` and pad it least."""
    num_blocks = -(-length // largest)
    return num_blocks, -(-length // num_blocks)


def _over_kv_heads(function, arrays, segment_ids, kv_segment_ids):
    """Calls `function(*arrays, segments)` for each sequence and key/value head in turn."""
    segments = None
    if segment_ids is not None:
        segments = (segment_ids, segment_ids if kv_segment_ids is None else kv_segment_ids)

    def sequence(arguments):
        arrays, segments = arguments
        return lax.map(lambda per_head: function(*per_head, segments), arrays)

    return lax.map(sequence, (arrays, segments))


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
