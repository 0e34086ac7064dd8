"""A mixture of experts in the place of a feed-forward block (Shazeer et al., 2017, arXiv:1701.06538), without drops.

The router gives each token k experts and their weights. The token's row is repeated for each of them, the rows are
sorted by expert, the experts' module maps the sorted rows, and the k results of a token are added up. Every shape
depends on the number of tokens alone, never on what the router chose: the groups of rows are told apart by their sizes,
which are data.

Shapes: M tokens of the batch, E model dim, F expert's inner dim, X experts, k experts of a token, R = M * k rows.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.core.init import Initializer, Normal


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
      experts_Mk: the chosen experts' ids, int64, the likeliest first.
    """

    scores_MX: Tensor
    weights_Mk: Tensor
    experts_Mk: Tensor


class Router(nn.Module):
    """A linear gate, a softmax over all experts, and the k likeliest of them; all in float32.

    The weight is used in float32 even where a precision policy hands it out in bfloat16: rounding the scores would
    make experts tie.
    """

    def __init__(self, config: RouterConfig):
        super().__init__()
        self.num_active_experts = config.num_active_experts
        self.normalize_weights = config.normalize_weights
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim, dtype=torch.float32))
        self.param_init = {"weight": config.weight_init}

    def forward(self, x_ME: Tensor) -> Routing:
        """Chooses for each token; gradients flow through the scores and the weights."""
        scores_MX = F.linear(x_ME.float(), self.weight.float()).softmax(dim=-1)
        weights_Mk, experts_Mk = scores_MX.topk(self.num_active_experts, dim=-1)
        if self.normalize_weights:
            weights_Mk = weights_Mk / weights_Mk.sum(dim=-1, keepdim=True)
        return Routing(scores_MX, weights_Mk, experts_Mk)


@dataclasses.dataclass(frozen=True)
class LoopExpertsConfig:
    """Configuration of `LoopExperts`.

    Attributes:
      num_experts: X.
      dim: E.
      ffn_dim: F.
      weight_init: initial values of all three weights.
    """

    num_experts: int
    dim: int
    ffn_dim: int
    weight_init: Initializer = Normal(0.02)

    def build(self) -> "LoopExperts":
        """The module, on the current default device."""
        return LoopExperts(self)


class LoopExperts(nn.Module):
    """Experts as a loop, each over all rows with those of the others masked: the readable reference.

    It does X times the work of a grouped matrix product. What takes its place has the same weights, under the same
    names, and the same `forward`.
    """

    def __init__(self, config: LoopExpertsConfig):
        super().__init__()
        in_shape = (config.num_experts, config.dim, config.ffn_dim)
        out_shape = (config.num_experts, config.ffn_dim, config.dim)
        self.w1 = nn.Parameter(torch.empty(in_shape, dtype=torch.float32))  # gate
        self.w2 = nn.Parameter(torch.empty(out_shape, dtype=torch.float32))  # output
        self.w3 = nn.Parameter(torch.empty(in_shape, dtype=torch.float32))  # up
        self.param_init = dict.fromkeys(("w1", "w2", "w3"), config.weight_init)

    def forward(self, rows_RE: Tensor, group_sizes_X: Tensor, weights_R: Tensor) -> Tensor:
        """`(silu(row @ w1) * (row @ w3)) @ w2 * weight`, each row with the matrices of its own expert.

        Args:
          rows_RE: the rows, sorted by expert.
          group_sizes_X: int32 number of rows of each expert; their sum is R.
          weights_R: float32 weight of each row.

        Returns:
          [R, E] in the dtype of the experts' weights.
        """
        w1_XEF, w2_XFE, w3_XEF = self.w1, self.w2, self.w3
        rows_RE = rows_RE.to(w1_XEF.dtype)
        row_R = torch.arange(rows_RE.shape[0], device=rows_RE.device)
        ends_X = group_sizes_X.cumsum(0)
        starts_X = ends_X - group_sizes_X
        out_RE = torch.zeros_like(rows_RE)
        experts = zip(
            starts_X.unbind(), ends_X.unbind(), w1_XEF.unbind(), w2_XFE.unbind(), w3_XEF.unbind(), strict=True
        )
        for start, end, w1_EF, w2_FE, w3_EF in experts:
            # Rows of others are zeros on the way in, which the expert maps to zeros: nothing to mask on the way out.
            own_R1 = ((row_R >= start) & (row_R < end)).unsqueeze(1)
            x_RE = torch.where(own_R1, rows_RE, 0.0)
            out_RE = out_RE + (F.silu(x_RE @ w1_EF) * (x_RE @ w3_EF)) @ w2_FE
        return (out_RE * weights_R.unsqueeze(1)).to(out_RE.dtype)


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Configuration of `MoE`.

    Attributes:
      router: chooses each token's experts.
      experts: node whose module maps (rows_RE, group_sizes_X, weights_R) to [R, E] as `LoopExperts` does.
    """

    router: RouterConfig
    experts: Any

    def build(self) -> "MoE":
        """The module, on the current default device."""
        return MoE(self)


class MoE(nn.Module):
    """Router, the way of rows to their experts and back, and the sum over a token's experts."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.router = config.router.build()
        self.experts = config.experts.build()

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., E] to [..., E]; the k results of a token are added in float32 and rounded once to x's dtype."""
        x_ME = x.flatten(0, -2)
        routing = self.router(x_ME)
        order = RowOrder.by_expert(routing.experts_Mk)
        num_tokens, num_active = routing.experts_Mk.shape
        rows_RE = x_ME.unsqueeze(1).expand(num_tokens, num_active, -1).flatten(0, 1)
        weights_R = routing.weights_Mk.flatten()
        group_sizes_X = count_rows(routing.experts_Mk, routing.scores_MX.shape[1])
        out_RE = self.experts(order.sort(rows_RE), group_sizes_X, order.sort(weights_R))
        out_MkE = order.unsort(out_RE).unflatten(0, (num_tokens, num_active))
        return out_MkE.sum(dim=1, dtype=torch.float32).to(x.dtype).view(x.shape)


def count_rows(experts_Mk: Tensor, num_experts: int) -> Tensor:
    """How many rows each expert gets, int32 [X]: a sum of one-hot vectors, which has a shape known beforehand."""
    chosen_RX = experts_Mk.flatten().unsqueeze(1) == torch.arange(num_experts, device=experts_Mk.device)
    return chosen_RX.sum(dim=0, dtype=torch.int32)


class RowOrder(NamedTuple):
    """A permutation of rows and its inverse.

    Attributes:
      forward_R: where each sorted row comes from.
      backward_R: where each unsorted row has gone to.
    """

    forward_R: Tensor
    backward_R: Tensor

    @classmethod
    def by_expert(cls, experts_Mk: Tensor) -> "RowOrder":
        """Sorts the rows (token 0's k, token 1's k, ...) by expert; those of one expert stay in the tokens' order."""
        forward_R = experts_Mk.flatten().argsort(stable=True)
        return cls(forward_R, forward_R.argsort(stable=True))

    def sort(self, rows: Tensor) -> Tensor:
        """[R, ...] in the tokens' order to the same in the experts' order."""
        return _Permute.apply(rows, self.forward_R, self.backward_R)

    def unsort(self, rows: Tensor) -> Tensor:
        """[R, ...] in the experts' order to the same in the tokens' order."""
        return _Permute.apply(rows, self.backward_R, self.forward_R)


class _Permute(torch.autograd.Function):
    """`rows[order]`, whose gradient is `grad[inverse]`: a gather too, where autograd's own would be a scatter-add."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
