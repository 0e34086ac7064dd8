"""A linear map."""

import dataclasses

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.core.init import Initializer, TruncatedNormal


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    """Configuration of `Linear`.

    Attributes:
      in_dim: size of the input's last dim.
      out_dim: size of the output's last dim.
      weight_init: initial values of the weight.
      bias_init: initial values of the bias; None: there is none.
    """

    in_dim: int
    out_dim: int
    weight_init: Initializer = TruncatedNormal(0.02)
    bias_init: Initializer | None = None

    def build(self) -> "Linear":
        """The module, on the current default device."""
        return Linear(self)


class Linear(nn.Module):
    """`x @ weight.T + bias`, computed in the weight's dtype.

    The weight decides the precision: a policy that hands out bfloat16 weights thereby makes the product a bfloat16 one,
    whatever the dtype of the activations.
    """

    def __init__(self, config: LinearConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.out_dim, config.in_dim, dtype=torch.float32))
        self.param_init = {"weight": config.weight_init}
        self.bias = None
        if config.bias_init is not None:
            self.bias = nn.Parameter(torch.empty(config.out_dim, dtype=torch.float32))
            self.param_init["bias"] = config.bias_init

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in_dim] of any float dtype to [..., out_dim] in the weight's dtype."""
        weight = self.weight  # read once: under a parametrisation each read is a gather
        return F.linear(x.to(weight.dtype), weight, self.bias)
