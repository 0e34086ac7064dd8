"""Rotary embedding of FLUX.1: each token has three positions, each of which rotates a part of a head's pairs.

Text stands at (0, 0, 0), an image's patch at (0, row, column). Pairs are adjacent elements.

Shapes: B batch, T tokens, N heads, D head dim, H = D / 2 pairs, of which the i-th position has h_i.
"""

import dataclasses

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class FluxRopeConfig:
    """Configuration of `FluxRope`.

    Attributes:
      dims: elements of a head that each position rotates; even.
      theta: the base of the geometric sequence of wavelengths.
      matrices: give 2x2 matrices rather than cosines and sines.
    """

    dims: tuple[int, ...]
    theta: float = 10_000.0
    matrices: bool = False

    def build(self) -> "FluxRope":
        """The module, which has no parameters and no buffers."""
        return FluxRope(self)


class FluxRope(nn.Module):
    """What rotates the heads of all blocks, computed from positions by tensor ops: no table, no buffer."""

    def __init__(self, config: FluxRopeConfig):
        super().__init__()
        self.config = config

    def forward(self, positions_BTA: Tensor) -> tuple[Tensor, ...]:
        """For integer positions [B, T, 3]: cosines and sines, float32 [B, 1, T, H], or matrices [B, 1, T, H, 2, 2]."""
        positions_BTA = positions_BTA.float()
        angles = [positions_BTA[..., i : i + 1] * self._frequencies(i, positions_BTA.device) for i in range(3)]
        angles_B1TH = torch.cat(angles, dim=-1).unsqueeze(1)
        cos_B1TH, sin_B1TH = angles_B1TH.cos(), angles_B1TH.sin()
        if not self.config.matrices:
            return cos_B1TH, sin_B1TH
        return (torch.stack((cos_B1TH, -sin_B1TH, sin_B1TH, cos_B1TH), dim=-1).unflatten(-1, (2, 2)),)

    def _frequencies(self, index: int, device: torch.device) -> Tensor:
        """Radians per unit of one position, float32 [h]."""
        dim = self.config.dims[index]
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        return torch.reciprocal(self.config.theta**exponents)


@dataclasses.dataclass(frozen=True)
class MatrixRotaryConfig:
    """Configuration of `MatrixRotary`."""

    def build(self) -> "MatrixRotary":
        """The module, which has no parameters."""
        return MatrixRotary()


class MatrixRotary(nn.Module):
    """`titan.models.layers.rope.Rotary` of adjacent pairs as products with 2x2 matrices, as the release computes it."""

    def forward(self, x_BTND: Tensor, matrices_B1THIJ: Tensor) -> Tensor:
        """Returns the rotated heads [B, N, T, D] in x's dtype, given the matrices of `FluxRope`."""
        pairs_BNTH1J = x_BTND.transpose(1, 2).float().unflatten(-1, (-1, 1, 2))
        first, second = matrices_B1THIJ[..., 0], matrices_B1THIJ[..., 1]
        return (first * pairs_BNTH1J[..., 0] + second * pairs_BNTH1J[..., 1]).flatten(-2).to(x_BTND.dtype)
