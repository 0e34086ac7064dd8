"""Fused linear cross-entropy: the language-model head's matmul, softmax and loss with no full logits in memory.

Two algorithms (`Gradients`), both exact, trade memory for matrix multiplications; docs/kernels.md has the HBM that each
takes at heads of real models. On v6e its temporary is the float32 [M, E] array of BACKWARD, the float32 [V, E] of
FORWARD. With XLA's forward in place of the Mosaic kernel and plain slices of the weight, BACKWARD took 168 / 1299 MiB
rather than 129 / 233 on v6e / tpu7x at 8192 x 4096 x 128256, with as many matrix multiplications: that is why "mosaic"
is the automatic choice on TPU. No time was measured on a TPU.

On a CPU at 8192 x 1024 x 32768 in float32, where `F.linear` and `F.cross_entropy` took 3086 MiB more than before the
call and 23.7 s of CPU time, BACKWARD took 264 MiB and 15.1 s, and FORWARD 10 s; XLA counts 356 MiB of temporaries and
results for FORWARD's forward pass.
"""

import enum
import math

import torch
from torch import Tensor

from titan.kernels.fused_linear_cross_entropy import pallas_tpu  # noqa: F401  (registers the implementation "mosaic")
from titan.kernels.fused_linear_cross_entropy.tiles import LANES, LinearCrossEntropyTiles
from titan.kernels.fused_linear_cross_entropy.token_tiles import loss_with_gradients
from titan.kernels.fused_linear_cross_entropy.vocab_shard import VocabShard
from titan.kernels.fused_linear_cross_entropy.xla import logits_statistics


class Gradients(enum.StrEnum):
    """When the gradients are computed, and thereby how the logits are cut.

    Attributes:
      BACKWARD: vocabulary tiles; four matrix multiplications of the logits' size; besides the gradients, it needs a
        float32 [M, E] array and one tile's logits.
      FORWARD: token tiles; three matrix multiplications; besides the gradients, it needs a float32 [V, E] array and one
        tile's logits, all in the forward pass, and the gradients stay in memory until the backward pass.
    """

    BACKWARD = "backward"
    FORWARD = "forward"


def fused_linear_cross_entropy(
    hidden_ME: Tensor,
    weight_VE: Tensor,
    labels_M: Tensor,
    token_weights_M: Tensor | None = None,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    soft_cap: float = 0.0,
    z_loss: float = 0.0,
    gradients: Gradients | str = Gradients.BACKWARD,
    tiles: LinearCrossEntropyTiles = LinearCrossEntropyTiles(),  # noqa: B008  (frozen)
    implementation: str = "auto",
    shard: VocabShard | None = None,
) -> Tensor:
    """The sum over tokens of `weight * (logsumexp(logits) - logits[label] + z_loss * logsumexp(logits)**2)`.

    `logits = soft_cap * tanh(scale * (hidden @ weight.T) / soft_cap)`, without the tanh where soft_cap is 0. Products
    are accumulated in float32. On TPU, float32 operands are multiplied with XLA's default precision (bfloat16 passes).

    Args:
      hidden_ME: float32 or bfloat16 [M, E], or with any leading dims such as [B, T, E], which are flattened.
      weight_VE: [V, E], of hidden's dtype.
      labels_M: integers, of hidden's leading dims. A label that is neither in [0, V) nor `ignore_index` cannot be
        refused, since its value may not be known yet: the loss, the weight's gradient and this token's become NaN.
      token_weights_M: factors of the tokens' losses, of the same dims; None means 1. They are constants: no gradient.
      ignore_index: the label of tokens that add nothing, neither to the loss nor to the gradients.
      scale: factor of the products.
      soft_cap: bound of the logits; 0 for none.
      z_loss: factor of the squared logsumexp.
      gradients: see `Gradients`. Where no gradient is needed (`torch.no_grad`), none is computed either way.
      tiles: sizes of the tiles; they change memory and speed, and no result beyond rounding.
      implementation: of the logits' statistics with gradients="backward": "auto", "xla" or "mosaic" (TPU kernel;
        elsewhere interpreted). "auto" is "mosaic" on TPU if E is a multiple of 128, else "xla"; gradients="forward" has
        only "xla".
      shard: weight is a part of the vocabulary, of V entries; labels are those of the whole. The loss is the whole one,
        the gradient of hidden that of this part of the logits.

    Returns:
      A float32 scalar: a sum, no mean.

    Raises:
      ValueError: shapes, dtypes or numbers do not fit, or a tile size is wrong; the text names the argument.
      NotImplementedError: the dtype is neither float32 nor bfloat16, or gradients="forward" is asked of "mosaic" or of
        a part of the vocabulary.
    """
    gradients = Gradients(gradients)
    _check(hidden_ME, weight_VE, labels_M, token_weights_M, scale=scale, soft_cap=soft_cap, z_loss=z_loss)
    hidden_ME, labels_M = hidden_ME.flatten(0, -2), labels_M.flatten()
    counts_M = labels_M != ignore_index
    is_valid_M = (labels_M >= 0) & (labels_M < (shard.vocab if shard else weight_VE.shape[0]))
    weights_M = torch.ones_like(labels_M, dtype=torch.float32)
    if token_weights_M is not None:
        weights_M = token_weights_M.detach().flatten().float()
    weights_M = torch.where(counts_M, torch.where(is_valid_M, weights_M, math.nan), 0.0)
    needs_gradient = torch.is_grad_enabled() and (hidden_ME.requires_grad or weight_VE.requires_grad)

    if gradients is Gradients.FORWARD and implementation not in ("auto", "xla"):
        raise NotImplementedError(
            f'gradients="forward" has no implementation {implementation!r}: '
            'leave it "auto", or take gradients="backward"'
        )
    if gradients is Gradients.FORWARD and shard:
        raise NotImplementedError('gradients="forward" needs the whole vocabulary: take gradients="backward"')
    if gradients is Gradients.FORWARD and needs_gradient:
        return loss_with_gradients(
            hidden_ME,
            weight_VE,
            labels_M,
            weights_M,
            scale=scale,
            soft_cap=soft_cap,
            z_loss=z_loss,
            token_tile=tiles.token_tile,
        ).out
    if implementation == "auto" and weight_VE.shape[1] % LANES:
        implementation = "xla"  # which keeps such a weight column by column in HBM; the kernel would have it copied
    logsumexp_M, label_logit_M = logits_statistics(
        hidden_ME,
        weight_VE,
        labels_M - shard.start if shard else labels_M,
        scale=scale,
        soft_cap=soft_cap,
        vocab_tile=tiles.vocab_tile,
        block_tokens=tiles.block_tokens,
        block_vocab=tiles.block_vocab,
        block_embed=tiles.block_embed,
        implementation=implementation,
    )
    if shard:
        logsumexp_M, label_logit_M = shard.combine(logsumexp_M, label_logit_M)
    losses_M = logsumexp_M - label_logit_M
    if z_loss:
        losses_M = losses_M + z_loss * logsumexp_M.square()
    return (weights_M * losses_M).sum()


def _check(
    hidden_ME: Tensor,
    weight_VE: Tensor,
    labels_M: Tensor,
    token_weights_M: Tensor | None,
    *,
    scale: float,
    soft_cap: float,
    z_loss: float,
) -> None:
    if hidden_ME.dim() < 2 or weight_VE.dim() != 2 or hidden_ME.shape[-1] != weight_VE.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden_ME.shape)} and weight {list(weight_VE.shape)}: they must be [..., E] and [V, E]"
        )
    if hidden_ME.numel() == 0 or weight_VE.numel() == 0:
        raise ValueError(
            f"hidden {list(hidden_ME.shape)} or weight {list(weight_VE.shape)} is empty: give both elements"
        )
    for name, tensor in (("labels", labels_M), ("token_weights", token_weights_M)):
        if tensor is not None and tensor.shape != hidden_ME.shape[:-1]:
            raise ValueError(
                f"{name} is {list(tensor.shape)}: it must have hidden's leading dims, {list(hidden_ME.shape[:-1])}"
            )
    if labels_M.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels is {labels_M.dtype}: convert it to torch.int64 or torch.int32")
    if hidden_ME.dtype != weight_VE.dtype:
        raise ValueError(f"hidden is {hidden_ME.dtype} and weight {weight_VE.dtype}: convert one to the other's dtype")
    if hidden_ME.dtype not in (torch.float32, torch.bfloat16):
        raise NotImplementedError(f"hidden and weight are {hidden_ME.dtype}: convert them to float32 or bfloat16")
    if not math.isfinite(scale) or scale == 0.0:
        raise ValueError(f"scale is {scale}: it must be a finite number other than 0")
    for name, number in (("soft_cap", soft_cap), ("z_loss", z_loss)):
        if not (math.isfinite(number) and number >= 0.0):
            raise ValueError(f"{name} is {number}: it must be at least 0, which means none, and finite")
