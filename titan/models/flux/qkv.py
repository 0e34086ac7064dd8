"""Queries, keys and values of one stream, out of one projection.

Shapes: B batch, T tokens, E model dim, N heads, D head dim, F = 3 N D.
"""

import dataclasses

import torch
from torch import Tensor, nn

from titan.models.layers.norm import RMSNormConfig


@dataclasses.dataclass(frozen=True)
class QkvConfig:
    """Configuration of `Qkv`; each attribute but `by_view` is the node of the child of that name.

    Attributes:
      q_norm: normalises each query head.
      k_norm: normalises each key head.
      by_view: unpack by a view, or by a copy with the heads in front of the tokens.
    """

    q_norm: RMSNormConfig
    k_norm: RMSNormConfig
    by_view: bool = True

    def build(self) -> "Qkv":
        """The module, on the current default device."""
        return Qkv(self)


class Qkv(nn.Module):
    """Splits a projection into normalised queries, normalised keys, and values."""

    def __init__(self, config: QkvConfig):
        super().__init__()
        self.head_dim = config.q_norm.dim
        self.by_view = config.by_view
        self.q_norm = config.q_norm.build()
        self.k_norm = config.k_norm.build()

    def forward(self, projection_BTF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, T, N, D] of a projection whose F columns are (q, k, v) x heads x D."""
        parts_BT3ND = projection_BTF.unflatten(-1, (3, -1, self.head_dim))
        if self.by_view:
            q_BTND, k_BTND, v_BTND = parts_BT3ND.unbind(2)
            return self.q_norm(q_BTND), self.k_norm(k_BTND), v_BTND
        q_BNTD, k_BNTD, v_BNTD = parts_BT3ND.permute(2, 0, 3, 1, 4).contiguous().unbind(0)
        return self.q_norm(q_BNTD).transpose(1, 2), self.k_norm(k_BNTD).transpose(1, 2), v_BNTD.transpose(1, 2)


def joined(text: tuple[Tensor, ...], image: tuple[Tensor, ...]) -> list[Tensor]:
    """Queries, keys and values of text and image as those of one sequence, text first."""
    return [torch.cat(pair, dim=1) for pair in zip(text, image, strict=True)]
