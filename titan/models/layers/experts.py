"""The experts of a mixture: each token's row through the feed-forwards of its experts, and the weighted sum of these.

Every shape depends on the number of tokens alone, never on what the router chose: the rows of the experts are told
apart by their numbers, which are data.

Shapes: M tokens, E model dim, F expert's inner dim, X experts, k experts of a token, R rows, at most M * k.
"""

import abc
import dataclasses

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.core.init import Initializer, Normal
from titan.models.layers.routed_rows import RowsByExpert


class Experts(nn.Module, abc.ABC):
    """Copies each token's row for its experts, sorts the rows by expert, maps them, and adds a token's results up.

    A subclass has the weights w1 and w3 [X, E, F] (gate and up) and w2 [X, F, E] (output), and says how rows are
    mapped. Nothing is dropped here.
    """

    w1: Tensor
    w2: Tensor
    w3: Tensor

    def forward(self, x_ME: Tensor, weights_Mk: Tensor, experts_Mk: Tensor, capacity: int | None = None) -> Tensor:
        """The weighted sums of the results of each token's experts, [M, E] in x's dtype, added up in float32.

        Args:
          x_ME: the tokens.
          weights_Mk: float32 weight of each expert's result.
          experts_Mk: ids of each token's experts, all different; X stands for nobody.
          capacity: the most tokens that one expert can have; None: M. The rows that memory is needed for are the least
            of M * k, M * X and X * capacity.
        """
        w1_XEF, w2_XFE, w3_XEF = self.w1, self.w2, self.w3  # read once: under a parametrisation each read is a gather
        num_tokens, num_experts = len(x_ME), len(w1_XEF)
        rows = RowsByExpert.of(experts_Mk, num_experts, num_experts * min(num_tokens, capacity or num_tokens))
        out_RE = self.map_rows(
            rows.tokens.spread(x_ME.to(w1_XEF.dtype)),
            rows.group_sizes_X,
            rows.choices.spread(weights_Mk.flatten()),
            (w1_XEF, w2_XFE, w3_XEF),
        )
        return rows.tokens.collect(out_RE, x_ME.dtype)

    @abc.abstractmethod
    def map_rows(
        self, rows_RE: Tensor, group_sizes_X: Tensor, weights_R: Tensor, matrices: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """`(silu(row @ w1) * (row @ w3)) @ w2 * weight`, each row with the matrices of its own expert.

        Args:
          rows_RE: the rows, sorted by expert, in the dtype of the matrices.
          group_sizes_X: int32 number of rows of each expert, together R at most; rows after them give zeros.
          weights_R: float32 weight of each row.
          matrices: w1, w2, w3.

        Returns:
          [R, E] in the dtype of the matrices.
        """


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


class LoopExperts(Experts):
    """Experts as a loop, each over all rows with those of the others masked: the readable reference.

    It does X times the work of a grouped matrix product. What takes its place has the same weights, under the same
    names, and maps rows to the same.
    """

    def __init__(self, config: LoopExpertsConfig):
        super().__init__()
        in_shape = (config.num_experts, config.dim, config.ffn_dim)
        out_shape = (config.num_experts, config.ffn_dim, config.dim)
        self.w1 = nn.Parameter(torch.empty(in_shape, dtype=torch.float32))  # gate
        self.w2 = nn.Parameter(torch.empty(out_shape, dtype=torch.float32))  # output
        self.w3 = nn.Parameter(torch.empty(in_shape, dtype=torch.float32))  # up
        self.param_init = dict.fromkeys(("w1", "w2", "w3"), config.weight_init)

    def map_rows(
        self, rows_RE: Tensor, group_sizes_X: Tensor, weights_R: Tensor, matrices: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """As `Experts.map_rows`."""
        row_R = torch.arange(rows_RE.shape[0], device=rows_RE.device)
        ends_X = group_sizes_X.cumsum(0)
        starts_X = ends_X - group_sizes_X
        out_RE = torch.zeros_like(rows_RE)
        for start, end, w1_EF, w2_FE, w3_EF in zip(starts_X, ends_X, *matrices, strict=True):
            # Rows of others are zeros on the way in, which the expert maps to zeros: nothing to mask on the way out.
            own_R1 = ((row_R >= start) & (row_R < end)).unsqueeze(1)
            x_RE = torch.where(own_R1, rows_RE, 0.0)
            out_RE = out_RE + (F.silu(x_RE @ w1_EF) * (x_RE @ w3_EF)) @ w2_FE
        return (out_RE * weights_R.unsqueeze(1)).to(out_RE.dtype)
