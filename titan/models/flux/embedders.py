"""What all tokens of an image are conditioned on: its timestep, its text's pooled embedding, the guidance scale.

Shapes: B batch, P images of a row, K size of the sinusoid or of the pooled embedding, E model dim.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.models.layers.linear import LinearConfig

_MAX_PERIOD = 10_000.0
_UNITS = 1000.0  # the published weights count time from 0 to 1000, and a guidance scale in thousandths


@dataclasses.dataclass(frozen=True)
class EmbedderConfig:
    """Configuration of `Embedder`; each attribute is the node of the child of that name.

    Attributes:
      in_layer: linear, K to E.
      out_layer: linear, E to E.
    """

    in_layer: LinearConfig
    out_layer: LinearConfig

    def build(self) -> "Embedder":
        """The module, on the current default device."""
        return Embedder(self)


class Embedder(nn.Module):
    """`out_layer(silu(in_layer(x)))`."""

    def __init__(self, config: EmbedderConfig):
        super().__init__()
        self.in_layer = config.in_layer.build()
        self.out_layer = config.out_layer.build()

    def forward(self, x_BPK: Tensor) -> Tensor:
        """Maps [B, P, K] to [B, P, E]."""
        return self.out_layer(F.silu(self.in_layer(x_BPK)))


def sinusoid(numbers: Tensor, size: int) -> Tensor:
    """Cosines and then sines of a number at wavelengths that grow from 2 pi to 1e4 times that (in thousandths).

    Args:
      numbers: float32, of any shape: times from 0 to 1, or guidance scales.
      size: even size of the result's last dim.

    Returns:
      float32 [..., size].
    """
    half = size // 2
    steps = torch.arange(half, dtype=torch.float32, device=numbers.device) / half
    angles = (numbers * _UNITS).unsqueeze(-1) * torch.exp(-math.log(_MAX_PERIOD) * steps)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
