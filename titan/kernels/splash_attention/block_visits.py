"""Which pairs of blocks the splash attention kernel of JAX visits where the queries' place is known at run time alone.

The kernel reads from scalar memory, for each step of its grid, whether to compute and which block to load. JAX fills
these tables on the host from a mask of fixed place; here they are computed on the device, from where the queries begin.

I blocks of queries, J blocks of keys, W steps for each block of the other kind.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from titan.kernels.splash_attention.mask import PositionMask


class BlockVisits(NamedTuple):
    """The tables of one kernel, for all heads.

    Attributes:
      block: block to have in memory at each step, [1, I, W] of keys, or [1, W, J] of queries. At steps that compute
        nothing it is the block of the next step that does, so that it is there in time.
      is_visited: 1 at steps that compute, of the same shape.
      query_index: index of each query among all tokens, int32 [length_q].
    """

    block: jax.Array
    is_visited: jax.Array
    query_index: jax.Array


def block_visits(
    mask: PositionMask,
    query_starts: jax.Array,
    length_q: int,
    length_kv: int,
    blocks: tuple[int, int],
    *,
    by_key: bool,
    shrink: bool,
) -> BlockVisits:
    """The tables of a kernel for queries in chunks.

    Args:
      mask: causal, or with a window.
      query_starts: index among all tokens of the first query of each chunk, int32; chunks do not overlap.
      length_q: queries, in chunks of equal length, of whole blocks.
      length_kv: keys, in whole blocks.
      blocks: queries in a block, keys in a block.
      by_key: the kernel goes through the queries for each block of keys, rather than the reverse.
      shrink: leave out steps that compute nothing for any `query_starts`; else a step is the block of its number.
    """
    block_q, block_kv = blocks
    offsets = np.arange(length_q // len(query_starts), dtype=np.int32)
    query_index = (query_starts.astype(jnp.int32)[:, None] + offsets).reshape(-1)
    begin_I = query_index[::block_q]
    first_I, end_I = mask.key_range(begin_I, begin_I + block_q, length_kv)
    begin_J = np.arange(0, length_kv, block_kv, dtype=np.int32)
    # A range of keys has no gaps, and neither has a block.
    seen_IJ = (first_I[:, None] < begin_J + block_kv) & (end_I[:, None] > begin_J)
    seen = seen_IJ.T if by_key else seen_IJ
    block = jnp.broadcast_to(jnp.arange(seen.shape[1]), seen.shape)
    if shrink:
        own, other = (block_kv, block_q) if by_key else (block_q, block_kv)
        width = _most_visits(mask, own, other, len(query_starts) if by_key else 1)
        if width < seen.shape[1]:
            block, seen = _seen_first(seen, width)
    block = _next_visited(block, seen)
    tables = (_small(x.T if by_key else x, largest=max(seen_IJ.shape)) for x in (block, seen))
    return BlockVisits(*(table[None] for table in tables), query_index)


def _most_visits(mask: PositionMask, own: int, other: int, num_chunks: int) -> int:
    """An upper bound of the blocks of `other` tokens, which lie in so many chunks, that one of `own` tokens sees."""
    if not mask.window:
        return np.iinfo(np.int32).max
    # What is seen is one span. The L tokens of it in one chunk are in fewer than L / other + 2 blocks, and less than a
    # block of tokens, those by which a chunk is padded, counts for two chunks.
    span = own + (mask.window - 1) * (1 if mask.causal else 2)
    return math.ceil(span / other) + 3 * num_chunks - 2


def _seen_first(seen: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """In each row the blocks that are seen, in order, as [rows, width], and which of them there are."""
    place = jnp.cumsum(seen, axis=1) - 1
    step = np.arange(width)
    is_it = seen[:, :, None] & (place[:, :, None] == step)
    block = jnp.sum(jnp.where(is_it, np.arange(seen.shape[1])[:, None], 0), axis=1)
    return block, step <= place[:, -1:]


def _next_visited(block: jax.Array, seen: jax.Array) -> jax.Array:
    """`block` where it is seen, else that of the next step that is, row after row; after the last such step, any."""
    num_rows, width = seen.shape
    step = lax.cummin(jnp.where(seen, np.arange(width), width), axis=1, reverse=True)
    in_row = jnp.take_along_axis(block, jnp.minimum(step, width - 1), axis=1)
    # The next row in which anything is seen, and the first block there.
    row = lax.cummin(jnp.where(seen.any(axis=1), np.arange(num_rows), num_rows), reverse=True)
    first = in_row[jnp.minimum(jnp.roll(row, -1).at[-1].set(num_rows), num_rows - 1), 0]
    return jnp.where(step < width, in_row, first[:, None])


def _small(table: jax.Array, largest: int) -> jax.Array:
    """In the smallest dtype: scalar memory is scarce."""
    return table.astype(next(dtype for dtype in (jnp.int8, jnp.int16, jnp.int32) if largest <= jnp.iinfo(dtype).max))
