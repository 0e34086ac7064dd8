"""Shapes of fused linear cross-entropy for tests and benchmarks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from titan.kernels.fused_linear_cross_entropy import pallas_tpu  # noqa: F401  (registers the implementation "mosaic")
from titan.kernels.fused_linear_cross_entropy.logits import cap, contract
from titan.kernels.fused_linear_cross_entropy.tiles import KERNEL, tiles_for, vmem_bytes
from titan.kernels.fused_linear_cross_entropy.token_tiles import LossAndGradients, loss_with_gradients
from titan.kernels.fused_linear_cross_entropy.vjp import logits_statistics_backward
from titan.kernels.fused_linear_cross_entropy.xla import logits_statistics
from titan.kernels.kernel_case import KernelCase


@dataclasses.dataclass(frozen=True)
class LossShape:
    """The dims M, E and V of a loss, and what is done to its logits."""

    num_tokens: int
    embed_dim: int
    vocab: int
    scale: float = 1.0
    soft_cap: float = 0.0

    def args(self, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
        """hidden_ME, weight_VE and labels_M, abstract."""
        return (
            jax.ShapeDtypeStruct((self.num_tokens, self.embed_dim), dtype),
            jax.ShapeDtypeStruct((self.vocab, self.embed_dim), dtype),
            jax.ShapeDtypeStruct((self.num_tokens,), jnp.int32),
        )

    @property
    def logits_bytes(self) -> int:
        """The size of the full float32 logits, which no program may have."""
        return 4 * self.num_tokens * self.vocab


SMALL = LossShape(1024, 64, 8192)
"""Large enough that full logits stand out, small enough for a CPU."""

LARGE = (
    LossShape(8192, 4096, 128256),
    LossShape(8192, 16384, 128256),
    LossShape(16384, 6656, 202048, scale=0.196, soft_cap=20.0),
    LossShape(8192, 4096, 151936),
)
"""Heads of real models; each is compiled ahead of time."""


def by_vocabulary_tiles(shape: LossShape, *arrays: jax.Array, **tiles: int) -> LossAndGradients:
    """Loss and gradients by the op `logits_statistics` and its backward op, as gradients="backward" has them."""
    attributes = {"scale": shape.scale, "soft_cap": shape.soft_cap, **tiles}
    statistics = logits_statistics.jax(*arrays, **attributes)
    ones_M = jnp.ones(shape.num_tokens)
    gradients = logits_statistics_backward.jax(*arrays, statistics.logsumexp_M, ones_M, -ones_M, **attributes)
    return LossAndGradients((statistics.logsumexp_M - statistics.label_logit_M).sum(), *gradients)


def by_token_tiles(shape: LossShape, *arrays: jax.Array, **tiles: int) -> LossAndGradients:
    """Loss and gradients by the op `loss_with_gradients`, as gradients="forward" has them."""
    ones_M = jnp.ones(shape.num_tokens)
    return loss_with_gradients.jax(*arrays, ones_M, scale=shape.scale, soft_cap=shape.soft_cap, z_loss=0.0, **tiles)


def unfused(shape: LossShape, hidden_ME: jax.Array, weight_VE: jax.Array, labels_M: jax.Array) -> LossAndGradients:
    """Loss and gradients with the full logits, as XLA makes them of the plain formula."""

    def loss(hidden_ME: jax.Array, weight_VE: jax.Array) -> jax.Array:
        logits_MV = cap(contract(hidden_ME, weight_VE, 1, 1), shape.scale, shape.soft_cap)
        label_logit_M = jnp.take_along_axis(logits_MV, labels_M[:, None], 1)[:, 0]
        return (jax.nn.logsumexp(logits_MV, 1) - label_logit_M).sum()

    value, gradients = jax.value_and_grad(loss, (0, 1))(hidden_ME, weight_VE)
    return LossAndGradients(value, *gradients)


def aot_cases(generation: str) -> list[KernelCase]:
    """Forward and backward at the `LARGE` shapes in bfloat16, by vocabulary tiles (against unfused) and token tiles."""
    cases = []
    for shape in LARGE:
        hidden_ME, weight_VE, labels_M = shape.args()
        blocks = vmem_bytes(tiles_for(hidden_ME, weight_VE, generation=generation), hidden_ME.dtype.itemsize)
        elements = shape.embed_dim * (shape.num_tokens + shape.vocab)
        for name, fused, peer in (("vocabulary", by_vocabulary_tiles, unfused), ("token", by_token_tiles, None)):
            cap_name = f", soft cap {shape.soft_cap:g}" if shape.soft_cap else ""
            cases.append(
                KernelCase(
                    kernel=KERNEL,
                    name=f"{shape.num_tokens} x {shape.embed_dim} x {shape.vocab}{cap_name}, {name} tiles",
                    args=(hidden_ME, weight_VE, labels_M),
                    fused=functools.partial(fused, shape),
                    unfused=functools.partial(peer, shape) if peer else None,
                    flops=3 * 2.0 * shape.num_tokens * shape.embed_dim * shape.vocab,
                    # Operands are read in the forward and the backward pass, gradients written once.
                    hbm_bytes=3.0 * elements * hidden_ME.dtype.itemsize,
                    vmem_bytes=blocks if fused is by_vocabulary_tiles else 0,
                )
            )
    return cases
