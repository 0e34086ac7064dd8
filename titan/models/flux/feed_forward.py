"""Feed-forward block with the tanh approximation of GELU (Hendrycks and Gimpel, 2016, arXiv:1606.08415)."""

import dataclasses

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.models.layers.linear import LinearConfig


@dataclasses.dataclass(frozen=True)
class GeluFeedForwardConfig:
    """Configuration of `GeluFeedForward`.

    Attributes:
      w_in: linear, dim to inner dim.
      w_out: linear, inner dim to dim.
    """

    w_in: LinearConfig
    w_out: LinearConfig

    def build(self) -> "GeluFeedForward":
        """The module, on the current default device."""
        return GeluFeedForward(self)


class GeluFeedForward(nn.Module):
    """`w_out(gelu(w_in(x)))`."""

    def __init__(self, config: GeluFeedForwardConfig):
        super().__init__()
        self.w_in = config.w_in.build()
        self.w_out = config.w_out.build()

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., dim] to [..., dim]."""
        return self.w_out(F.gelu(self.w_in(x), approximate="tanh"))
