"""Route scores as a PyTorch custom op."""

import jax

from titan.kernels.jax_op import jax_op
from titan.kernels.route_scores.vjp import apply_route_scores_backward
from titan.kernels.route_scores.xla import scale_rows


@jax_op("titan::apply_route_scores", backward=apply_route_scores_backward)
def apply_route_scores_op(expert_out: jax.Array, scores: jax.Array, *, block_m: int = 0, block_e: int = 0) -> jax.Array:
    """Rows [M, E] times scores [M]: see `api.apply_route_scores`, which validates and calls it."""
    return scale_rows(expert_out, scores)


@apply_route_scores_op.implementation("mosaic")
def _mosaic(expert_out: jax.Array, scores: jax.Array, *, block_m: int = 0, block_e: int = 0) -> jax.Array:
    """The kernel is in the backward; the forward is one multiplication, which XLA fuses with its neighbours."""
    return scale_rows(expert_out, scores)
