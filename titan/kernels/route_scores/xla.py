"""Route scores in plain JAX.

XLA:TPU makes one fusion of both gradients: it reads expert_out and the gradient once, and the float32 values live in
registers only.
"""

import jax
import jax.numpy as jnp


def scale_rows(expert_out: jax.Array, scores: jax.Array) -> jax.Array:
    """Rows [M, E] times scores [M], multiplied in float32, in expert_out's dtype."""
    return (expert_out.astype(jnp.float32) * scores.astype(jnp.float32)[:, None]).astype(expert_out.dtype)


def gradients(expert_out: jax.Array, scores: jax.Array, grad_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of expert_out [M, E] and scores [M] in their dtypes; the latter is summed in float32."""
    products = grad_out.astype(jnp.float32) * expert_out.astype(jnp.float32)
    return scale_rows(grad_out, scores), jnp.sum(products, axis=1).astype(scores.dtype)
