"""The definition of right: attention as plain PyTorch, with the whole matrix of scores.

B batch, N query heads, K key/value heads, T tokens (as queries), S tokens (as keys), C chunks of queries, D head dim.
"""

import torch
from torch import Tensor

from titan.kernels.splash_attention.mask import PositionMask


def attention_reference(
    q_BNTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    segment_ids_BT: Tensor | None = None,
    kv_segment_ids_BT: Tensor | None = None,
    query_starts_C: Tensor | None = None,
    *,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention in the dtype of its arguments throughout; float64 makes it an oracle. Autograd gives the gradients.

    The arguments are those of `titan.kernels.splash_attention.api.splash_attention`.

    Returns:
      out_BNTD, and logsumexp_BNT: the logarithm of the softmax's denominator. For a query that sees no key these are 0
      and -inf.
    """
    group = q_BNTD.shape[1] // k_BKTD.shape[1]
    k_BNSD = k_BKTD.repeat_interleave(group, dim=1)
    v_BNSD = v_BKTD.repeat_interleave(group, dim=1)
    scores_BNTS = q_BNTD @ k_BNSD.transpose(2, 3) * scale
    if soft_cap:
        scores_BNTS = soft_cap * torch.tanh(scores_BNTS / soft_cap)

    index_T = torch.arange(q_BNTD.shape[2], device=q_BNTD.device)
    index_S = torch.arange(k_BKTD.shape[2], device=q_BNTD.device)
    if query_starts_C is not None:
        index_T = (query_starts_C[:, None] + index_T.view(len(query_starts_C), -1)[0]).flatten()
    hidden_BNTS = torch.zeros_like(scores_BNTS, dtype=torch.bool)
    visible_TS = PositionMask(causal, window).visible(index_T[:, None], index_S)
    if visible_TS is not None:
        hidden_BNTS = hidden_BNTS | ~visible_TS
    if segment_ids_BT is not None:
        kv_segment_ids_BT = segment_ids_BT if kv_segment_ids_BT is None else kv_segment_ids_BT
        hidden_BNTS = hidden_BNTS | (segment_ids_BT[:, None, :, None] != kv_segment_ids_BT[:, None, None, :])

    # A finite stand-in for -inf keeps rows that see no key free of NaN; the second fill then empties them.
    lowest = torch.finfo(scores_BNTS.dtype).min
    weights_BNTS = torch.softmax(scores_BNTS.masked_fill(hidden_BNTS, lowest), dim=-1).masked_fill(hidden_BNTS, 0.0)
    logsumexp_BNT = torch.logsumexp(scores_BNTS.detach().masked_fill(hidden_BNTS, float("-inf")), dim=-1)
    return weights_BNTS @ v_BNSD, logsumexp_BNT
