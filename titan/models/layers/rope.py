"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) in either layout.

In the half-rotation layout of Hugging Face's Llama and Qwen, element i of a head is paired with element i + H; with
adjacent pairs, as in Meta's original checkpoints, 2i with 2i + 1. A permutation of the rows of wq and wk leads from one
to the other.

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


def apply_rope(x_BNTD: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor, *, adjacent_pairs: bool = False) -> Tensor:
    """Rotates each pair of the last dim, in float32; the result is contiguous and has x's dtype.

    Args:
      x_BNTD: queries or keys, D = 2 H.
      cos_B1TH: cosines from `Rope`, float32.
      sin_B1TH: sines from `Rope`, float32.
      adjacent_pairs: pairs are (2i, 2i + 1) rather than (i, i + H).
    """
    x32_BNTD = x_BNTD.float()
    if adjacent_pairs:
        first_BNTH, second_BNTH = x32_BNTD.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first_BNTH, second_BNTH = x32_BNTD.chunk(2, dim=-1)
    rotated = (first_BNTH * cos_B1TH - second_BNTH * sin_B1TH, second_BNTH * cos_B1TH + first_BNTH * sin_B1TH)
    rotated_BNTD = torch.stack(rotated, dim=-1).flatten(-2) if adjacent_pairs else torch.cat(rotated, dim=-1)
    return rotated_BNTD.to(x_BNTD.dtype)


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """Configuration of `Rotary`.

    Attributes:
      adjacent_pairs: see `apply_rope`.
    """

    adjacent_pairs: bool = False

    def build(self) -> "Rotary":
        """The module, which has no parameters."""
        return Rotary(self)


class Rotary(nn.Module):
    """The rotation of a projection's heads, and their move in front of the tokens, as a node that can be swapped."""

    def __init__(self, config: RotaryConfig):
        super().__init__()
        self.adjacent_pairs = config.adjacent_pairs

    def forward(self, x_BTND: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor) -> Tensor:
        """Returns the rotated heads [B, N, T, D], given the cosines and sines of `Rope`."""
        return apply_rope(x_BTND.transpose(1, 2), cos_B1TH, sin_B1TH, adjacent_pairs=self.adjacent_pairs)


@dataclasses.dataclass(frozen=True)
class NoRotaryConfig:
    """Configuration of `NoRotary`."""

    def build(self) -> "NoRotary":
        """The module, which has no parameters."""
        return NoRotary()


class NoRotary(nn.Module):
    """In place of `Rotary` in a layer without positions (NoPE): heads move in front of the tokens, as they are."""

    def forward(self, x_BTND: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor) -> Tensor:
        """Returns the heads [B, N, T, D], a view."""
        return x_BTND.transpose(1, 2)
