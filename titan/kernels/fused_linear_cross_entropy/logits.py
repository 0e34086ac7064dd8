"""A tile of logits and its derivative: what every algorithm of fused linear cross-entropy shares."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")


def contract(lhs: jax.Array, rhs: jax.Array, lhs_dim: int, rhs_dim: int) -> jax.Array:
    """The product of two matrices over one dim of each, in float32 whatever their dtype."""
    dims = (((lhs_dim,), (rhs_dim,)), ((), ()))
    return lax.dot_general(lhs, rhs, dims, preferred_element_type=jnp.float32)


def cap(scores: jax.Array, scale: float, soft_cap: float) -> jax.Array:
    """Logits of raw products: scaled, then capped smoothly to (-soft_cap, soft_cap) unless that is 0."""
    logits = scores * scale if scale != 1.0 else scores
    return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits


def scores_gradient(logits_gradient: jax.Array, logits: jax.Array, scale: float, soft_cap: float) -> jax.Array:
    """The gradient of the raw products from that of the logits."""
    if soft_cap:
        logits_gradient = logits_gradient * (1.0 - jnp.square(logits / soft_cap))
    return logits_gradient * scale if scale != 1.0 else logits_gradient


def is_label(labels_M: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
    """Where a tile of the logits [M, size], from vocabulary entry `start` on, has its tokens' labels."""
    return lax.broadcasted_iota(jnp.int32, (labels_M.shape[0], size), 1) == (labels_M - start)[:, None]


def for_each_tile(length: int, tile: int, body: Callable[[jax.Array | int, int, Carry], Carry], carry: Carry) -> Carry:
    """Folds `body(start, size, carry)` over the tiles of a length: a loop over the whole ones, then the rest by itself.

    The rest is a smaller tile of its own rather than a padded one, so that nothing is copied or masked.
    """
    num_whole, rest = divmod(length, tile)
    if num_whole:  # the body of a loop is traced even if it never runs, and this one's slice might not fit
        carry = lax.fori_loop(0, num_whole, lambda i, carried: body(i * tile, tile, carried), carry)
    return body(length - rest, rest, carry) if rest else carry
