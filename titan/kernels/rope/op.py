"""The ops `titan::rotate_heads` and its backward, each plain XLA or a Pallas kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from titan.kernels.jax_op import jax_op
from titan.kernels.rope import pallas_tpu


class Gradients(NamedTuple):
    """Of `rotate_heads_op`; the angles have none."""

    x: jax.Array


@jax_op("titan::rotate_heads_backward", backward=None)
def rotate_heads_backward(
    cos: jax.Array, sin: jax.Array, grad_out: jax.Array, *, adjacent_pairs: bool = False
) -> Gradients:
    """[B, N, T, D] back to [B, T, N D]: the transposition of a rotation turns the other way."""
    batch, num_heads, length, head_dim = grad_out.shape
    rotated_BNTD = _rotate(grad_out, cos, -sin, adjacent_pairs)
    return Gradients(rotated_BNTD.swapaxes(1, 2).reshape(batch, length, num_heads * head_dim))


@rotate_heads_backward.implementation("mosaic", platforms=("tpu",), pallas=True)
def _rotate_heads_backward_mosaic(
    cos: jax.Array, sin: jax.Array, grad_out: jax.Array, *, adjacent_pairs: bool
) -> Gradients:
    return Gradients(pallas_tpu.rotate_back(grad_out, cos, sin, adjacent_pairs=adjacent_pairs))


@jax_op("titan::rotate_heads", backward=rotate_heads_backward)
def rotate_heads_op(x: jax.Array, cos: jax.Array, sin: jax.Array, *, adjacent_pairs: bool = False) -> jax.Array:
    """[B, T, N D] and the cosines and sines [B, T, D / 2] in float32, to [B, N, T, D] in x's dtype."""
    batch, length, half = cos.shape
    return _rotate(x.reshape(batch, length, -1, 2 * half).swapaxes(1, 2), cos, sin, adjacent_pairs)


@rotate_heads_op.implementation("mosaic", platforms=("tpu",), pallas=True)
def _rotate_heads_mosaic(x: jax.Array, cos: jax.Array, sin: jax.Array, *, adjacent_pairs: bool) -> jax.Array:
    return pallas_tpu.rotate(x, cos, sin, adjacent_pairs=adjacent_pairs)


def _rotate(x_BNTD: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array, adjacent_pairs: bool) -> jax.Array:
    x = x_BNTD.astype(jnp.float32)
    first, second = (x[..., ::2], x[..., 1::2]) if adjacent_pairs else jnp.split(x, 2, axis=-1)
    cos, sin = cos_BTH[:, None], sin_BTH[:, None]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    out = jnp.stack(rotated, axis=-1).reshape(x.shape) if adjacent_pairs else jnp.concatenate(rotated, axis=-1)
    return out.astype(x_BNTD.dtype)
