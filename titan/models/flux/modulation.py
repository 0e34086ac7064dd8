"""Adaptive layer norm (adaLN-Zero of Peebles and Xie, 2022, arXiv:2212.09748): an image's vector scales and shifts.

Shapes: B batch, P images of a row, T tokens, E model dim. Image p of a row has the segment id p + 1, 0 is padding.
"""

import dataclasses

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.models.layers.linear import LinearConfig

_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class ModulationConfig:
    """Configuration of `Modulation`.

    Attributes:
      linear: linear with a bias, E to `num_vectors` E.
      num_vectors: how many vectors it gives.
    """

    linear: LinearConfig
    num_vectors: int

    def build(self) -> "Modulation":
        """The module, on the current default device."""
        return Modulation(self)


class Modulation(nn.Module):
    """The vectors, such as shift, scale and gate, that a block makes of what its tokens are conditioned on."""

    def __init__(self, config: ModulationConfig):
        super().__init__()
        self.num_vectors = config.num_vectors
        self.linear = config.linear.build()

    def forward(self, conditioning_BPE: Tensor, segment_ids_BT: Tensor) -> list[Tensor]:
        """The vectors that each token meets: [B, T, E] each, or [B, 1, E] for all tokens where a row has one image.

        Args:
          conditioning_BPE: the vector of each image.
          segment_ids_BT: integer image of each token.
        """
        vectors = self.linear(F.silu(conditioning_BPE)).chunk(self.num_vectors, dim=-1)
        return [_of_tokens(vector_BPE, segment_ids_BT) for vector_BPE in vectors]


def modulated_norm(x_BTE: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """`layer_norm(x) * (1 + scale) + shift` without weights, in float32 and rounded once to x's dtype."""
    x32_BTE = x_BTE.float()
    centred_BTE = x32_BTE - x32_BTE.mean(-1, keepdim=True)
    normed_BTE = centred_BTE * torch.rsqrt(centred_BTE.square().mean(-1, keepdim=True) + _EPS)
    return (normed_BTE * (1.0 + scale.float()) + shift.float()).to(x_BTE.dtype)


def _of_tokens(vector_BPE: Tensor, segment_ids_BT: Tensor) -> Tensor:
    """The vector of each token's image.

    By a masked sum, which is exact, since all terms but one are 0: unlike a gather it has a gradient without scatter.
    """
    num_images = vector_BPE.shape[1]
    if num_images == 1:
        return vector_BPE
    images_P = torch.arange(1, num_images + 1, device=segment_ids_BT.device, dtype=segment_ids_BT.dtype)
    is_own_BTP1 = (segment_ids_BT.unsqueeze(-1) == images_P).unsqueeze(-1)
    return torch.where(is_own_BTP1, vector_BPE.unsqueeze(1), 0.0).sum(2)
