"""A mixture of experts in the place of a feed-forward block (Shazeer et al., 2017, arXiv:1701.06538).

The router gives each token k experts and their weights; the experts map the token and the k results are added up. With
a capacity an expert takes only so many of a device's tokens, the first ones; without, nothing is dropped.

Shapes: M tokens of the batch, E model dim, L mixtures of the model, X experts, k experts of a token.
"""

import dataclasses
from typing import Any

from torch import Tensor, nn

from titan.models.layers.router import RouterConfig
from titan.models.layers.routing_tally import RoutingTally


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Configuration of `MoE`.

    Attributes:
      router: chooses each token's experts.
      experts: node whose module is called as `titan.models.layers.experts.Experts` is.
      capacity_factor: the most tokens of an expert, as a multiple of what it has of a device's tokens if all experts
        have as many. 0: no limit.
    """

    router: RouterConfig
    experts: Any
    capacity_factor: float = 0.0

    def build(self) -> "MoE":
        """The module, on the current default device."""
        return MoE(self)


class MoE(nn.Module):
    """Router and experts."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.router = config.router.build()
        self.experts = config.experts.build()
        self.capacity_factor = config.capacity_factor

    def forward(
        self, x: Tensor, tally: RoutingTally | None = None, bias_LX: Tensor | None = None
    ) -> Tensor | tuple[Tensor, RoutingTally]:
        """Maps [..., E] to [..., E] in x's dtype.

        Args:
          x: the tokens.
          tally: of the mixtures before this one; with it the result is a pair, with the tally after this one.
          bias_LX: float32, added to the scores of each mixture's experts for the choice alone; needs a tally.
        """
        x_ME = x.flatten(0, -2)
        chosen = kept = self.router(x_ME, None if bias_LX is None else tally.row(bias_LX))
        capacity = None
        if self.capacity_factor:
            capacity = self.router.capacity(len(x_ME), self.capacity_factor)
            kept = chosen.within(capacity)
        out = self.experts(x_ME, kept.weights_Mk, kept.experts_Mk, capacity).view(x.shape)
        return out if tally is None else (out, tally.add(chosen, kept))
