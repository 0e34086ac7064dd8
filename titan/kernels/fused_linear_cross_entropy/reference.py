"""What fused linear cross-entropy computes, in plain PyTorch with all logits in memory: the definition of right."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from titan.kernels.fused_linear_cross_entropy.vocab_shard import VocabShard


def reference_linear_cross_entropy(
    hidden_ME: Tensor,
    weight_VE: Tensor,
    labels_M: Tensor,
    token_weights_M: Tensor | None = None,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    soft_cap: float = 0.0,
    z_loss: float = 0.0,
    shard: VocabShard | None = None,
) -> Tensor:
    """The summed loss of `fused_linear_cross_entropy`, in float64 for float64 arguments and in float32 for all others.

    Narrow arguments are multiplied in their own dtype, as an unfused model would.

    Raises:
      IndexError: a label is neither `ignore_index` nor in [0, V) (from `F.cross_entropy`, of a whole vocabulary).
    """
    dtype = torch.float64 if hidden_ME.dtype == torch.float64 else torch.float32
    logits_MV = scale * F.linear(hidden_ME.flatten(0, -2), weight_VE).to(dtype)
    if soft_cap:
        logits_MV = soft_cap * torch.tanh(logits_MV / soft_cap)
    labels_M = labels_M.flatten().long()
    logsumexp_M = torch.logsumexp(logits_MV, 1)
    if shard is None:
        losses_M = F.cross_entropy(logits_MV, labels_M, ignore_index=ignore_index, reduction="none")
    else:
        index_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
        is_label_MV = (labels_M - shard.start).unsqueeze(1) == index_V
        label_logit_M = torch.where(is_label_MV, logits_MV, 0.0).sum(1)
        logsumexp_M, label_logit_M = shard.combine(logsumexp_M, label_logit_M)
        losses_M = (logsumexp_M - label_logit_M) * (labels_M != ignore_index)
    losses_M = losses_M + z_loss * logsumexp_M.square() * (labels_M != ignore_index)
    if token_weights_M is not None:
        losses_M = losses_M * token_weights_M.detach().flatten().to(dtype)
    return losses_M.sum()
