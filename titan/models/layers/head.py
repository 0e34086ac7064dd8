"""A head whose logits are scaled and softly bounded (as in Gemma 2, arXiv:2408.00118)."""

import dataclasses

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.core.init import Initializer, TruncatedNormal


@dataclasses.dataclass(frozen=True)
class SoftCappedHeadConfig:
    """Configuration of `SoftCappedHead`.

    Attributes:
      in_dim: size of the input's last dim.
      out_dim: number of words.
      scale: factor of the products.
      soft_cap: bound of the logits, above 0.
      weight_init: initial values of the weight.
    """

    in_dim: int
    out_dim: int
    scale: float
    soft_cap: float
    weight_init: Initializer = TruncatedNormal(0.02)

    def build(self) -> "SoftCappedHead":
        """The module, on the current default device."""
        return SoftCappedHead(self)


class SoftCappedHead(nn.Module):
    """`soft_cap * tanh(scale * (x @ weight.T) / soft_cap)`.

    The product has the weight's dtype, as that of `Linear`; what follows it, and the result, are float32.
    """

    def __init__(self, config: SoftCappedHeadConfig):
        super().__init__()
        self.scale = config.scale
        self.soft_cap = config.soft_cap
        self.weight = nn.Parameter(torch.empty(config.out_dim, config.in_dim, dtype=torch.float32))
        self.param_init = {"weight": config.weight_init}

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in_dim] of any float dtype to float32 logits [..., out_dim]."""
        weight = self.weight  # read once: under a parametrisation each read is a gather
        products = F.linear(x.to(weight.dtype), weight).float()
        return torch.tanh(products * (self.scale / self.soft_cap)) * self.soft_cap
