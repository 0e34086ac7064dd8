"""Gated feed-forward block, SwiGLU (Shazeer, 2020, arXiv:2002.05202)."""

import dataclasses

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.models.layers.linear import LinearConfig


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig:
    """Configuration of `FeedForward`; the names are those of Meta's Llama.

    Attributes:
      w1: gate projection, dim to ffn_dim.
      w2: output projection, ffn_dim to dim.
      w3: up projection, dim to ffn_dim.
    """

    w1: LinearConfig
    w2: LinearConfig
    w3: LinearConfig

    def build(self) -> "FeedForward":
        """The module, on the current default device."""
        return FeedForward(self)


class FeedForward(nn.Module):
    """`w2(silu(w1(x)) * w3(x))`."""

    def __init__(self, config: FeedForwardConfig):
        super().__init__()
        self.w1 = config.w1.build()
        self.w2 = config.w2.build()
        self.w3 = config.w3.build()

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., dim] to [..., dim]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
