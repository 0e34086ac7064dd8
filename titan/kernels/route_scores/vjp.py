"""Gradients of the route scores: expert_out and the scores are all that backward needs of the forward."""

from typing import NamedTuple

import jax

from titan.kernels.jax_op import jax_op
from titan.kernels.route_scores import pallas_tpu, xla
from titan.kernels.route_scores.tiles import resolve


class Gradients(NamedTuple):
    """Gradients of expert_out [M, E] and scores [M]."""

    expert_out: jax.Array
    scores: jax.Array


@jax_op("titan::apply_route_scores_backward", backward=None)
def apply_route_scores_backward(
    expert_out: jax.Array, scores: jax.Array, grad_out: jax.Array, *, block_m: int, block_e: int
) -> Gradients:
    """Gradients of `titan::apply_route_scores`."""
    return Gradients(*xla.gradients(expert_out, scores, grad_out))


@apply_route_scores_backward.implementation("mosaic", pallas=True)
def _mosaic(expert_out: jax.Array, scores: jax.Array, grad_out: jax.Array, *, block_m: int, block_e: int) -> Gradients:
    tiles = resolve(block_m, block_e, num_columns=expert_out.shape[1], itemsize=expert_out.dtype.itemsize)
    return Gradients(*pallas_tpu.gradients(expert_out, scores, grad_out, tiles=tiles))
