"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

import dataclasses

import torch
from torch import Tensor, nn

from titan.core.init import Initializer, Ones


@dataclasses.dataclass(frozen=True)
class RMSNormConfig:
    """Configuration of `RMSNorm`.

    Attributes:
      dim: size of the input's last dim.
      eps: added to the mean square.
      weight_init: initial values of the weight.
    """

    dim: int
    eps: float = 1e-5
    weight_init: Initializer = Ones()

    def build(self) -> "RMSNorm":
        """The module, on the current default device."""
        return RMSNorm(self)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim, computed in float32 and rounded once to x's dtype."""

    def __init__(self, config: RMSNormConfig):
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(config.dim, dtype=torch.float32))
        self.param_init = {"weight": config.weight_init}

    def forward(self, x: Tensor) -> Tensor:
        """Normalises [..., dim]; the result has x's shape and dtype."""
        x32 = x.float()
        scale = torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + self.eps)
        return (x32 * scale * self.weight.float()).to(x.dtype)
