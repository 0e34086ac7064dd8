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
      centre: added to the weight; with 1 the weight is the deviation from a scale of 1, and begins at and decays to 0.
    """

    dim: int
    eps: float = 1e-5
    weight_init: Initializer = Ones()
    centre: float = 0.0

    def build(self) -> "RMSNorm":
        """The module, on the current default device."""
        return RMSNorm(self)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * (weight + centre)` over the last dim, in float32 and rounded once to x's dtype."""

    def __init__(self, config: RMSNormConfig):
        super().__init__()
        self.eps = config.eps
        self.centre = config.centre
        self.weight = nn.Parameter(torch.empty(config.dim, dtype=torch.float32))
        self.param_init = {"weight": config.weight_init}

    def forward(self, x: Tensor) -> Tensor:
        """Normalises [..., dim]; the result has x's shape and dtype."""
        weight = self.weight.float()
        if self.centre:
            weight = weight + self.centre
        return (_normalized(x, self.eps) * weight).to(x.dtype)


@dataclasses.dataclass(frozen=True)
class UnscaledRMSNormConfig:
    """Configuration of `UnscaledRMSNorm`.

    Attributes:
      eps: added to the mean square.
    """

    eps: float = 1e-5

    def build(self) -> "UnscaledRMSNorm":
        """The module, which has no parameters."""
        return UnscaledRMSNorm(self)


class UnscaledRMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps)` over the last dim, computed in float32 and rounded once to x's dtype."""

    def __init__(self, config: UnscaledRMSNormConfig):
        super().__init__()
        self.eps = config.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dim; the result has x's shape and dtype."""
        return _normalized(x, self.eps).to(x.dtype)


def _normalized(x: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    return x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps)
