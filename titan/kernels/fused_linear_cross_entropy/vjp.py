"""Backward ops of fused linear cross-entropy."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from titan.kernels.fused_linear_cross_entropy import row_dma
from titan.kernels.fused_linear_cross_entropy.logits import cap, contract, for_each_tile, is_label, scores_gradient
from titan.kernels.fused_linear_cross_entropy.tiles import tiles_for
from titan.kernels.generations import find_generation
from titan.kernels.jax_op import jax_op
from titan.kernels.target import current_target


class Gradients(NamedTuple):
    """Gradients of hidden and weight, in their dtypes."""

    hidden_ME: jax.Array
    weight_VE: jax.Array


@jax_op("titan::linear_cross_entropy_statistics_backward", backward=None)
def logits_statistics_backward(
    hidden_ME: jax.Array,
    weight_VE: jax.Array,
    labels_M: jax.Array,
    logsumexp_M: jax.Array,
    grad_logsumexp_M: jax.Array,
    grad_label_logit_M: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    vocab_tile: int = 0,
) -> Gradients:
    """The gradients of `logits_statistics`, from each vocabulary tile's logits, computed again.

    A tile gives its rows of the weight's gradient, and its share of hidden's, which is added up in float32.
    """
    tensors = hidden_ME, weight_VE, labels_M, logsumexp_M, grad_logsumexp_M, grad_label_logit_M
    return _by_tiles(*tensors, scale=scale, soft_cap=soft_cap, vocab_tile=vocab_tile)


@logits_statistics_backward.implementation("mosaic", platforms=("tpu",), pallas=True)
def logits_statistics_backward_mosaic(
    hidden_ME: jax.Array,
    weight_VE: jax.Array,
    labels_M: jax.Array,
    logsumexp_M: jax.Array,
    grad_logsumexp_M: jax.Array,
    grad_label_logit_M: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    vocab_tile: int,
) -> Gradients:
    """The same, but on some TPU generations rows of weight and of its gradient are moved by DMA: see `row_dma`."""
    rows = {}
    generation = current_target().generation  # "": the interpreter
    if (not generation or find_generation(generation).moves_rows_by_dma) and row_dma.can_move_rows(weight_VE):
        rows = {"read_rows": row_dma.read_rows, "write_rows": row_dma.write_rows}
    tensors = hidden_ME, weight_VE, labels_M, logsumexp_M, grad_logsumexp_M, grad_label_logit_M
    return _by_tiles(*tensors, scale=scale, soft_cap=soft_cap, vocab_tile=vocab_tile, **rows)


def _slice_rows(matrix: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(matrix, start, size)


def _update_rows(matrix: jax.Array, rows: jax.Array, start: jax.Array | int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(matrix, rows, start, 0)


def _by_tiles(
    hidden_ME: jax.Array,
    weight_VE: jax.Array,
    labels_M: jax.Array,
    logsumexp_M: jax.Array,
    grad_logsumexp_M: jax.Array,
    grad_label_logit_M: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    vocab_tile: int,
    read_rows: Callable[..., jax.Array] = _slice_rows,
    write_rows: Callable[..., jax.Array] = _update_rows,
) -> Gradients:
    tile = tiles_for(hidden_ME, weight_VE, vocab_tile=vocab_tile).vocab_tile

    def add_tile(start: jax.Array | int, size: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        hidden_gradient_ME, weight_gradient_VE = carry
        tile_vE = read_rows(weight_VE, start, size)
        logits_Mv = cap(contract(hidden_ME, tile_vE, 1, 1), scale, soft_cap)
        gradient_Mv = grad_logsumexp_M[:, None] * jnp.exp(logits_Mv - logsumexp_M[:, None])
        gradient_Mv += jnp.where(is_label(labels_M, start, size), grad_label_logit_M[:, None], 0.0)
        gradient_Mv = scores_gradient(gradient_Mv, logits_Mv, scale, soft_cap).astype(hidden_ME.dtype)
        rows_vE = contract(gradient_Mv, hidden_ME, 0, 0).astype(weight_VE.dtype)
        return (
            hidden_gradient_ME + contract(gradient_Mv, tile_vE, 1, 0),
            write_rows(weight_gradient_VE, rows_vE, start),
        )

    nothing = jnp.zeros(hidden_ME.shape, jnp.float32), jnp.zeros_like(weight_VE)
    hidden_gradient_ME, weight_gradient_VE = for_each_tile(weight_VE.shape[0], tile, add_tile, nothing)
    return Gradients(hidden_gradient_ME.astype(hidden_ME.dtype), weight_gradient_VE)


@jax_op("titan::linear_cross_entropy_with_gradients_backward", backward=None)
def loss_with_gradients_backward(
    hidden_gradient_ME: jax.Array, weight_gradient_VE: jax.Array, grad_out: jax.Array
) -> Gradients:
    """The gradients that the forward pass computed, times that of the loss."""
    return Gradients(
        (hidden_gradient_ME * grad_out).astype(hidden_gradient_ME.dtype),
        (weight_gradient_VE * grad_out).astype(weight_gradient_VE.dtype),
    )
