"""What `rotate_heads` computes, in PyTorch: the definition that every implementation is tested against."""

import torch
from torch import Tensor


def rotate_heads_reference(x_BTF: Tensor, cos_BTH: Tensor, sin_BTH: Tensor, *, adjacent_pairs: bool = False) -> Tensor:
    """[B, T, N * 2 H] to [B, N, T, 2 H], in the dtype of the products; see `rotate_heads`."""
    batch, length, half = cos_BTH.shape
    x_BNTD = x_BTF.view(batch, length, -1, 2 * half).transpose(1, 2)
    pairs_BNTH2 = x_BNTD.unflatten(-1, (half, 2)) if adjacent_pairs else x_BNTD.unflatten(-1, (2, half)).mT
    first_BNTH, second_BNTH = pairs_BNTH2.unbind(-1)
    cos_B1TH, sin_B1TH = cos_BTH.unsqueeze(1), sin_BTH.unsqueeze(1)
    rotated_BNTH2 = torch.stack(
        (first_BNTH * cos_B1TH - second_BNTH * sin_B1TH, second_BNTH * cos_B1TH + first_BNTH * sin_B1TH), dim=-1
    )
    return (rotated_BNTH2 if adjacent_pairs else rotated_BNTH2.mT).flatten(-2)
