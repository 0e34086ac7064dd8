"""Token tiles: the loss and both gradients in one pass over the tokens, in plain XLA.

A tile of tokens has its logits over the whole vocabulary, which give its loss and the gradient of the logits at once:
three matrix multiplications instead of the four of vocabulary tiles, and nothing is computed again. The price is the
gradient of the weight, which is added up in a float32 array of the weight's shape.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from titan.kernels.fused_linear_cross_entropy.logits import cap, contract, for_each_tile, is_label, scores_gradient
from titan.kernels.fused_linear_cross_entropy.tiles import tiles_for
from titan.kernels.fused_linear_cross_entropy.vjp import loss_with_gradients_backward
from titan.kernels.jax_op import jax_op


class LossAndGradients(NamedTuple):
    """The float32 scalar loss, and its gradients in the dtypes of hidden and weight."""

    out: jax.Array
    hidden_gradient_ME: jax.Array
    weight_gradient_VE: jax.Array


@jax_op("titan::linear_cross_entropy_with_gradients", backward=loss_with_gradients_backward)
def loss_with_gradients(
    hidden_ME: jax.Array,
    weight_VE: jax.Array,
    labels_M: jax.Array,
    token_weights_M: jax.Array,
    *,
    scale: float,
    soft_cap: float,
    z_loss: float,
    token_tile: int = 0,
) -> LossAndGradients:
    """The weighted sum of the tokens' losses and its gradients.

    Args:
      hidden_ME, weight_VE: of one dtype, float32 or bfloat16; products are accumulated in float32.
      labels_M: int32.
      token_weights_M: float32, 0 for a token that does not count.
      scale, soft_cap, z_loss: see `fused_linear_cross_entropy`.
      token_tile: tokens at a time; 0 for the default.
    """
    tile = tiles_for(hidden_ME, weight_VE, token_tile=token_tile).token_tile

    def add_tile(start: jax.Array | int, size: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        loss, hidden_gradient_ME, weight_gradient_VE = carry
        tile_mE, labels_m, weights_m = (
            lax.dynamic_slice_in_dim(array, start, size) for array in (hidden_ME, labels_M, token_weights_M)
        )
        logits_mV = cap(contract(tile_mE, weight_VE, 1, 1), scale, soft_cap)
        hit_mV = is_label(labels_m, 0, weight_VE.shape[0])
        max_m = logits_mV.max(1)
        logsumexp_m = max_m + jnp.log(jnp.exp(logits_mV - max_m[:, None]).sum(1))
        losses_m = logsumexp_m - jnp.where(hit_mV, logits_mV, 0.0).sum(1) + z_loss * jnp.square(logsumexp_m)
        softmax_weights_m = weights_m * (1.0 + 2.0 * z_loss * logsumexp_m)
        gradient_mV = softmax_weights_m[:, None] * jnp.exp(logits_mV - logsumexp_m[:, None])
        gradient_mV -= jnp.where(hit_mV, weights_m[:, None], 0.0)
        gradient_mV = scores_gradient(gradient_mV, logits_mV, scale, soft_cap).astype(hidden_ME.dtype)
        rows_mE = contract(gradient_mV, weight_VE, 1, 0).astype(hidden_ME.dtype)
        return (
            loss + (weights_m * losses_m).sum(),
            lax.dynamic_update_slice_in_dim(hidden_gradient_ME, rows_mE, start, 0),
            weight_gradient_VE + contract(gradient_mV, tile_mE, 0, 0),
        )

    nothing = jnp.zeros(()), jnp.zeros_like(hidden_ME), jnp.zeros(weight_VE.shape, jnp.float32)
    loss, hidden_gradient_ME, weight_gradient_VE = for_each_tile(hidden_ME.shape[0], tile, add_tile, nothing)
    return LossAndGradients(loss, hidden_gradient_ME, weight_gradient_VE.astype(weight_VE.dtype))
