"""What the routers of a model's mixtures have done, added up on the way through the layers.

Shapes: L mixtures of the model, M tokens, X experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan.models.layers.routed_rows import count_rows
from titan.models.layers.router import Routing


class RoutingTally(NamedTuple):
    """Sums over the tokens of this device so far; it goes from layer to layer with the residual stream.

    Attributes:
      mixture: int32 scalar, which of the L mixtures comes next.
      chosen_LX: int32, how many tokens chose each expert of each mixture, whether it was dropped then or not.
      dropped: int32 scalar, choices dropped for lack of capacity, over all mixtures.
      entropy: float32 scalar, the entropy in nats of the experts' probabilities, over all mixtures and tokens. No
        gradient flows through it.
      probabilities_X: float32, each expert's probability, over all mixtures and tokens; gradients flow through it.
    """

    mixture: Tensor
    chosen_LX: Tensor
    dropped: Tensor
    entropy: Tensor
    probabilities_X: Tensor

    @classmethod
    def start(cls, num_mixtures: int, num_experts: int, device: torch.device | None = None) -> "RoutingTally":
        """All zero; the device is the current default one if none is given."""
        return cls(
            mixture=torch.zeros((), dtype=torch.int32, device=device),
            chosen_LX=torch.zeros(num_mixtures, num_experts, dtype=torch.int32, device=device),
            dropped=torch.zeros((), dtype=torch.int32, device=device),
            entropy=torch.zeros((), dtype=torch.float32, device=device),
            probabilities_X=torch.zeros(num_experts, dtype=torch.float32, device=device),
        )

    def row(self, table_LX: Tensor) -> Tensor:
        """The next mixture's row of a table of all."""
        return table_LX.index_select(0, self.mixture.unsqueeze(0)).squeeze(0)

    def add(self, chosen: Routing, kept: Routing) -> "RoutingTally":
        """With the next mixture's routing, before and after dropping."""
        num_mixtures, num_experts = self.chosen_LX.shape
        scores_MX = chosen.scores_MX.detach()
        entropy_M = -torch.xlogy(scores_MX, scores_MX).sum(dim=-1)
        is_this_L = torch.arange(num_mixtures, device=scores_MX.device) == self.mixture
        chosen_X = count_rows(chosen.experts_Mk, num_experts)
        dropped = 0 if kept is chosen else (kept.experts_Mk == num_experts).sum(dtype=torch.int32)
        return RoutingTally(
            mixture=self.mixture + 1,
            chosen_LX=self.chosen_LX + torch.where(is_this_L.unsqueeze(1), chosen_X, 0),
            dropped=self.dropped + dropped,
            entropy=self.entropy + entropy_M.sum(),
            probabilities_X=self.probabilities_X + chosen.scores_MX.sum(dim=0),
        )
