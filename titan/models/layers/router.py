"""The router of a mixture of experts: which experts each token is given to, with which weights, and what is dropped.

Shapes: M tokens, E model dim, X experts, k experts of a token.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.core.init import Initializer, Normal
from titan.models.layers.routed_rows import count_rows


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Configuration of `Router`.

    Attributes:
      dim: E.
      num_experts: X.
      num_active_experts: k.
      normalize_weights: divide a token's k weights by their sum.
      weight_init: initial values of the weight.
    """

    dim: int
    num_experts: int
    num_active_experts: int
    normalize_weights: bool = True
    weight_init: Initializer = Normal(0.02)

    def build(self) -> "Router":
        """The module, on the current default device."""
        return Router(self)


class Routing(NamedTuple):
    """What the router decided.

    Attributes:
      scores_MX: the probability of each expert, float32.
      weights_Mk: what the result of each chosen expert is multiplied by, float32.
      experts_Mk: the chosen experts' ids, int64, the first choice first; X: nobody.
    """

    scores_MX: Tensor
    weights_Mk: Tensor
    experts_Mk: Tensor

    def within(self, capacity: int) -> "Routing":
        """The same without the choices of an expert that `capacity` earlier tokens chose: weight 0, expert X."""
        num_experts = self.scores_MX.shape[1]
        sizes_X = count_rows(self.experts_Mk, num_experts)
        starts_X = sizes_X.cumsum(0) - sizes_X
        place_Mk = self.experts_Mk.flatten().argsort(stable=True).argsort(stable=True).view_as(self.experts_Mk)
        start_Mk = starts_X.index_select(0, self.experts_Mk.flatten()).view_as(self.experts_Mk)
        is_kept_Mk = place_Mk - start_Mk < capacity
        return Routing(
            self.scores_MX,
            torch.where(is_kept_Mk, self.weights_Mk, 0.0),
            torch.where(is_kept_Mk, self.experts_Mk, num_experts),
        )


class Router(nn.Module):
    """A linear gate, a softmax over all experts, and the k likeliest of them; all in float32.

    The weight is used in float32 even where a precision policy hands it out in bfloat16: rounding the scores would
    make experts tie.
    """

    def __init__(self, config: RouterConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.num_active_experts = config.num_active_experts
        self.normalize_weights = config.normalize_weights
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim, dtype=torch.float32))
        self.param_init = {"weight": config.weight_init}

    def forward(self, x_ME: Tensor, bias_X: Tensor | None = None) -> Routing:
        """Chooses for each token; gradients flow through the scores and the weights.

        Args:
          x_ME: the tokens.
          bias_X: float32, added to the scores for the choice alone: weights are made of the scores as they are (Wang et
            al., 2024, arXiv:2408.15664).
        """
        scores_MX = F.linear(x_ME.float(), self.weight.float()).softmax(dim=-1)
        if bias_X is None:
            weights_Mk, experts_Mk = scores_MX.topk(self.num_active_experts, dim=-1)
        else:
            experts_Mk = (scores_MX.detach() + bias_X).topk(self.num_active_experts, dim=-1).indices
            weights_Mk = scores_MX.gather(1, experts_Mk)
        if self.normalize_weights:
            weights_Mk = weights_Mk / weights_Mk.sum(dim=-1, keepdim=True)
        return Routing(scores_MX, weights_Mk, experts_Mk)

    def capacity(self, num_tokens: int, factor: float) -> int:
        """`factor` times the tokens that an expert has of so many if all experts have as many; rounded up."""
        return min(math.ceil(factor * num_tokens * self.num_active_experts / self.num_experts), num_tokens)
