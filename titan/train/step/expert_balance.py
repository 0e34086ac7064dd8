"""Balance of a mixture's experts: the bias that needs no loss, the auxiliary loss, and the numbers that are reported.

All of it is made of the sums that a `RoutingTally` holds, once they are summed over the devices.

Shapes: L mixtures of the model, X experts.
"""

import dataclasses

import torch
from torch import Tensor

from titan.models.layers.routing_tally import RoutingTally
from titan.train.config.expert_balance import ExpertBalanceConfig


@dataclasses.dataclass(frozen=True)
class ExpertBalance:
    """How the experts of one model are balanced.

    Attributes:
      num_mixtures: L.
      num_experts: X.
      num_active_experts: experts of a token.
      config: the flags.
    """

    num_mixtures: int
    num_experts: int
    num_active_experts: int
    config: ExpertBalanceConfig

    @property
    def bias_shape(self) -> tuple[int, int] | None:
        """That of the bias in the state; None where there is none."""
        return (self.num_mixtures, self.num_experts) if self.config.bias else None

    def start(self, device: torch.device | None = None) -> RoutingTally:
        """The tally that a microbatch begins with."""
        return RoutingTally.start(self.num_mixtures, self.num_experts, device)

    def auxiliary_loss(self, probabilities_X: Tensor, chosen_LX: Tensor) -> Tensor:
        """This device's summand of the auxiliary loss of a microbatch, which is the sum over devices.

        X times the sum over experts of the share of tokens that chose the expert and its mean probability, both over
        the tokens of all devices and over all mixtures together: Hugging Face's `load_balancing_loss_func` of the
        whole microbatch, without a mask of tokens (Fedus et al., 2021, arXiv:2101.03961, equations 4 to 6).

        Args:
          probabilities_X: this device's sums, with a gradient.
          chosen_LX: the sums of all devices.
        """
        chosen_X = chosen_LX.to(torch.float32).sum(dim=0)
        num_tokens = chosen_X.sum() / self.num_active_experts  # each as often as there are mixtures
        return self.num_experts * (chosen_X / num_tokens * (probabilities_X / num_tokens)).sum()

    def next_bias(self, bias_LX: Tensor, chosen_LX: Tensor) -> Tensor:
        """The bias after a step: nearer to what gives each expert as many tokens (Wang et al., arXiv:2408.15664).

        Args:
          bias_LX: before it.
          chosen_LX: the sums of all devices and microbatches.
        """
        chosen_LX = chosen_LX.to(torch.float32)
        return bias_LX + self.config.bias_rate * (chosen_LX.mean(dim=1, keepdim=True) - chosen_LX).sign()

    def metrics(self, chosen_LX: Tensor, dropped: Tensor, entropy: Tensor) -> dict[str, Tensor]:
        """What is reported of a step, from the sums of all devices and microbatches.

        Returns:
          `expert_load_max`: the tokens of a mixture's busiest expert over those of its mean one, mean over mixtures;
          `expert_load_worst`: the same of the worst mixture; `router_entropy`: mean entropy of a token's probabilities
          in nats; `dropped_fraction`: choices that were dropped, of all.
        """
        chosen_LX = chosen_LX.to(torch.float32)
        load_L = chosen_LX.amax(dim=1) / chosen_LX.mean(dim=1)
        num_choices = chosen_LX.sum()
        return {
            "expert_load_max": load_L.mean(),
            "expert_load_worst": load_L.amax(),
            "router_entropy": entropy / (num_choices / self.num_active_experts),
            "dropped_fraction": dropped.to(torch.float32) / num_choices,
        }
