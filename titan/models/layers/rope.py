"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) in the half-rotation layout of Hugging Face.

Element i of a head is paired with element i + H/2 (Meta's original checkpoints pair 2i with 2i + 1; Hugging Face's have
the rows of wq and wk permuted accordingly).

Shapes: B batch, T tokens, N heads, H half of the head dim.
"""

import dataclasses
import math

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated.

    Attributes:
      factor: how much the longest wavelengths are stretched.
      low_frequency_factor: a wavelength above `original_max_length / low_frequency_factor` is stretched in full.
      high_frequency_factor: a wavelength below `original_max_length / high_frequency_factor` is kept.
      original_max_length: the context length before the extension, in tokens.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_length: int = 8192


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Configuration of `Rope`.

    Attributes:
      head_dim: size of one head; even.
      theta: the base of the geometric sequence of wavelengths.
      scaling: frequency scaling, or None.
    """

    head_dim: int
    theta: float = 500_000.0
    scaling: Llama3RopeScaling | None = None

    def build(self) -> "Rope":
        """The module, which has no parameters and no buffers."""
        return Rope(self)


class Rope(nn.Module):
    """Cosines and sines of the rotation angles, computed from positions by tensor ops: no table, no buffer."""

    def __init__(self, config: RopeConfig):
        super().__init__()
        self.config = config

    def forward(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, float32 [B, 1, T, H], for integer positions [B, T]; all layers and heads share them."""
        angles_BTH = positions_BT.float().unsqueeze(-1) * self._frequencies(positions_BT.device)
        angles_B1TH = angles_BTH.unsqueeze(1)
        return angles_B1TH.cos(), angles_B1TH.sin()

    def _frequencies(self, device: torch.device) -> Tensor:
        """Radians per token, float32 [H]."""
        config = self.config
        exponents_H = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        frequencies_H = torch.reciprocal(config.theta**exponents_H)
        if config.scaling is None:
            return frequencies_H
        scaling = config.scaling
        periods_H = frequencies_H * (scaling.original_max_length / (2 * math.pi))  # turns within the original context
        spread = scaling.high_frequency_factor - scaling.low_frequency_factor
        kept_H = ((periods_H - scaling.low_frequency_factor) / spread).clamp(0.0, 1.0)
        return frequencies_H * (kept_H + (1.0 - kept_H) / scaling.factor)


def apply_rope(x_BNTD: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor) -> Tensor:
    """Rotates each pair (i, i + H) of the last dim, in float32; the result is contiguous and has x's dtype.

    Args:
      x_BNTD: queries or keys, D = 2 H.
      cos_B1TH: cosines from `Rope`, float32.
      sin_B1TH: sines from `Rope`, float32.
    """
    first_BNTH, second_BNTH = x_BNTD.float().chunk(2, dim=-1)
    rotated_BNTD = torch.cat(
        (first_BNTH * cos_B1TH - second_BNTH * sin_B1TH, second_BNTH * cos_B1TH + first_BNTH * sin_B1TH), dim=-1
    )
    return rotated_BNTD.to(x_BNTD.dtype)


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """Configuration of `Rotary`."""

    def build(self) -> "Rotary":
        """The module, which has no parameters."""
        return Rotary()


class Rotary(nn.Module):
    """The rotation of a projection's heads, and their move in front of the tokens, as a node that can be swapped."""

    def forward(self, x_BTND: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor) -> Tensor:
        """Returns the rotated heads [B, N, T, D], given the cosines and sines of `Rope`."""
        return apply_rope(x_BTND.transpose(1, 2), cos_B1TH, sin_B1TH)
