"""Rows that are copies of other rows, as a token's row is copied for each of its experts, and the way back.

Rows travel by gathers alone, in both directions and in their gradients: the table knows where each copy comes from and
where the copies of each row are, so that no gradient is a scatter.

Shapes: S source rows, J copies of a source row at most, R copies, E columns.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class CopyTable:
    """Which row each copy is of, and where the copies of each row are.

    Attributes:
      source_R: row that each copy is of; S where there is no copy.
      copies_SJ: places of the copies of each row; R where there is none.
      has_gaps: whether the tables name S or R anywhere; otherwise nothing has to be masked.
    """

    source_R: Tensor
    copies_SJ: Tensor
    has_gaps: bool

    def spread(self, rows: Tensor) -> Tensor:
        """[S, ...] to the copies [R, ...]; zeros where there is no copy."""
        return _Spread.apply(rows, self)

    def collect(self, copies: Tensor, dtype: torch.dtype) -> Tensor:
        """[R, ...] to the sums of each row's copies [S, ...], added up in float32 and rounded once to `dtype`."""
        return _Collect.apply(copies, self, dtype)

    def take(self, rows: Tensor, otherwise: float | int = 0.0) -> Tensor:
        """As `spread`, of rows that have no gradient, with another value where there is no copy."""
        if not self.has_gaps:
            return rows.index_select(0, self.source_R)
        taken = rows.index_select(0, self.source_R.clamp(max=len(rows) - 1))
        return _masked(taken, self.source_R < len(rows), otherwise)

    def _sum(self, copies: Tensor, dtype: torch.dtype) -> Tensor:
        where_SJ = self.copies_SJ.clamp(max=len(copies) - 1) if self.has_gaps else self.copies_SJ
        found = copies.index_select(0, where_SJ.flatten()).unflatten(0, where_SJ.shape)
        if self.has_gaps:
            found = _masked(found, self.copies_SJ < len(copies))
        return found.sum(dim=1, dtype=torch.float32).to(dtype)


def _masked(values: Tensor, is_there: Tensor, otherwise: float | int = 0.0) -> Tensor:
    """Another value where `is_there`, of the leading dims of `values`, is false, whatever lies there."""
    return torch.where(is_there.view(*is_there.shape, *[1] * (values.ndim - is_there.ndim)), values, otherwise)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, table: CopyTable) -> Tensor:
        _save(ctx, table)
        ctx.dtype = rows.dtype
        return table.take(rows)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _saved(ctx)._sum(grad, ctx.dtype), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, copies: Tensor, table: CopyTable, dtype: torch.dtype) -> Tensor:
        _save(ctx, table)
        ctx.dtype = copies.dtype
        return table._sum(copies, dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _saved(ctx).take(grad.to(ctx.dtype)), None, None


def _save(ctx, table: CopyTable) -> None:
    ctx.save_for_backward(table.source_R, table.copies_SJ)
    ctx.has_gaps = table.has_gaps


def _saved(ctx) -> CopyTable:
    return CopyTable(*ctx.saved_tensors, ctx.has_gaps)


@dataclasses.dataclass(frozen=True)
class RowsByExpert:
    """The copies of tokens' rows for their experts, sorted by expert; those of one expert in the tokens' order.

    Attributes:
      tokens: from M tokens to R rows.
      choices: from the M * k choices of an expert, token by token, to the same rows.
      group_sizes_X: int32 rows of each expert. Rows after the last expert's are nobody's.
    """

    tokens: CopyTable
    choices: CopyTable
    group_sizes_X: Tensor

    @classmethod
    def of(cls, experts_Mk: Tensor, num_experts: int, max_rows: int) -> "RowsByExpert":
        """The rows that routing gives each expert.

        Args:
        experts_Mk: ids of the experts of each token; `num_experts` stands for nobody.
        num_experts: X.
        max_rows: the most rows that experts can have together. R is no more than that.
        """
        num_tokens, num_active = experts_Mk.shape
        order_R = experts_Mk.flatten().argsort(stable=True)
        place_Mk = order_R.argsort(stable=True)
        num_rows = min(num_tokens * num_active, max_rows)
        # A choice that is cut off is nobody's. The table must say that it has no row, and `place` then is R or more.
        has_gaps = num_rows < num_tokens * num_active
        if has_gaps:
            order_R, place_Mk = order_R[:num_rows], place_Mk.clamp(max=num_rows)
        tokens = CopyTable(order_R // num_active, place_Mk.view(num_tokens, num_active), has_gaps)
        choices = CopyTable(order_R, place_Mk.unsqueeze(1), has_gaps)
        return cls(tokens, choices, count_rows(experts_Mk, num_experts))


def count_rows(experts_Mk: Tensor, num_experts: int) -> Tensor:
    """How many rows each expert gets, int32 [X]: a sum of one-hot vectors, which has a shape known beforehand."""
    chosen_RX = experts_Mk.flatten().unsqueeze(1) == torch.arange(num_experts, device=experts_Mk.device)
    return chosen_RX.sum(dim=0, dtype=torch.int32)
