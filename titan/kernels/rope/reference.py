"""What `rotate_heads` computes, in PyTorch: the definition that every implementation is tested against."""

import torch
from torch import Tensor


def rotate_heads_reference(x_BTF: Tensor, cos_BTH: Tensor, sin_BTH: Tensor) -> Tensor:
    """[B, T, N * 2 H] to [B, N, T, 2 H], in the dtype of the products; see `rotate_heads`."""
    batch, length, half = cos_BTH.shape
    x_BNTD = x_BTF.view(batch, length, -1, 2 * half).transpose(1, 2)
    first_BNTH, second_BNTH = x_BNTD.chunk(2, dim=-1)
    cos_B1TH, sin_B1TH = cos_BTH.unsqueeze(1), sin_BTH.unsqueeze(1)
    return torch.cat(
        (first_BNTH * cos_B1TH - second_BNTH * sin_B1TH, second_BNTH * cos_B1TH + first_BNTH * sin_B1TH), dim=-1
    )
