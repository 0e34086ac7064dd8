"""Tensor and sequence parallelism of a built model, from the plan of its family."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titan.parallel.collectives import gather_to_parts, gather_whole, scatter_sum, sum_parts, to_parts
from titan.parallel.mesh_axis import MeshAxis
from titan.parallel.module_boundaries import Axes, ModuleBorder
from titan.parallel.parallel_plan import Border, ParallelPlan, Split, Whole
from titan.parallel.segments import Segments
from titan.parallel.vocabulary import first_entry
from titan.parallel.weight_plan import WeightPlan

_TOKEN_DIM = 1  # of [B, T, E]


@dataclasses.dataclass(frozen=True)
class _TokenBorder(ModuleBorder):
    """A border between tokens, which devices have the same of or a slice each, and parts of the work on all of them.

    Attributes:
      axis: the mesh axis.
      splits_tokens: devices have a slice of the tokens each (sequence parallelism).
    """

    axis: str
    splits_tokens: bool

    def enter(self, x_BTE: Tensor, axis: MeshAxis) -> Tensor:
        """All tokens, of which each device does a part of the work."""
        return gather_to_parts(x_BTE, axis, _TOKEN_DIM) if self.splits_tokens else to_parts(x_BTE, axis)

    def leave(self, x_BTE: Tensor, axis: MeshAxis) -> Tensor:
        """The sum of the parts, of a device's own tokens."""
        return scatter_sum(x_BTE, axis, _TOKEN_DIM) if self.splits_tokens else sum_parts(x_BTE, axis)


class _BlockBorder(_TokenBorder):
    def run(self, forward: Callable[..., Any], axes: Axes, x_BTE: Tensor, *args: Any) -> Any:
        axis = axes[self.axis]
        result = forward(self.enter(x_BTE, axis), *args)
        if isinstance(result, tuple):  # a mixture of experts also tells what its router did with all the tokens
            return self.leave(result[0], axis), *result[1:]
        return self.leave(result, axis)


class _BeginBorder(_TokenBorder):
    def run(self, forward: Callable[..., Any], axes: Axes, x_BTE: Tensor, *args: Any) -> Any:
        return forward(self.enter(x_BTE, axes[self.axis]), *args)


class _EndBorder(_TokenBorder):
    def run(self, forward: Callable[..., Any], axes: Axes, *args: Any) -> Tensor:
        return self.leave(forward(*args), axes[self.axis])


class _FeatureBorder(_TokenBorder):
    def run(self, forward: Callable[..., Any], axes: Axes, *args: Any) -> Tensor:
        features = forward(*args)
        # Where tokens are split, each device has used all features, but for its own tokens alone.
        gather = gather_to_parts if self.splits_tokens else gather_whole
        return gather(features, axes[self.axis], features.dim() - 1)


@dataclasses.dataclass(frozen=True)
class _VocabularyBorder(_TokenBorder):
    """An embedding whose table is split by rows over the axis.

    Attributes:
        num_embeddings: rows of a device's slice of the table.
    """

    num_embeddings: int

    def run(self, forward: Callable[..., Any], axes: Axes, tokens_BT: Tensor) -> Tensor:
        axis = axes[self.axis]
        row_BT = tokens_BT - first_entry(axis, self.num_embeddings)
        is_here_BT = (row_BT >= 0) & (row_BT < self.num_embeddings)
        found_BTE = forward(torch.where(is_here_BT, row_BT, 0))
        return self.leave(torch.where(is_here_BT.unsqueeze(-1), found_BTE, 0.0), axis)


@dataclasses.dataclass(frozen=True)
class _SharedBorder(ModuleBorder):
    """The part that this device needs, from slices of parts of which there are fewer than devices.

    All slices are gathered, few as they are, since a mesh has no groups of the devices that share a part. The gradient
    of a slice is the sum over these devices, each of which has used the whole part for work of its own.

    Attributes:
      axis: the mesh axis.
      num_parts: of which the axis's size is a multiple.
    """

    axis: str
    num_parts: int

    def run(self, forward: Callable[..., Any], axes: Axes, *args: Any) -> Tensor:
        axis, slice_ = axes[self.axis], forward(*args)
        parts = gather_to_parts(slice_, axis, slice_.dim() - 1).unflatten(-1, (self.num_parts, -1))
        part = torch.arange(self.num_parts, device=slice_.device)
        is_needed = part == axis.index() // (axis.size // self.num_parts)
        # A sum of one part and zeros: its gradient is elementwise, where that of an index would scatter.
        return torch.where(is_needed.unsqueeze(-1), parts, 0.0).sum(dim=-2)


_BORDERS = {
    Border.BLOCK: _BlockBorder,
    Border.BEGIN: _BeginBorder,
    Border.END: _EndBorder,
    Border.FEATURES: _FeatureBorder,
    Border.LOSS: _BeginBorder,
}


def tensor_parallel_borders(
    model: nn.Module, plan: ParallelPlan, *, axis: str, size: int, sequence_parallel: bool
) -> dict[str, ModuleBorder]:
    """The borders of a model's modules, by path.

    Args:
      model: as built, on any device, its weights whole.
      plan: of its family.
      axis: the mesh axis.
      size: devices along it.
      sequence_parallel: split the tokens between the borders of blocks.
    """
    borders: dict[str, ModuleBorder] = {}
    for path, module in model.named_modules():
        module_plan = plan.of(path)
        if module_plan is None or module_plan.border is None:
            continue
        if module_plan.border is Border.VOCABULARY:
            borders[path] = _VocabularyBorder(axis, sequence_parallel, module.weight.shape[0] // size)
        elif module_plan.border is Border.SHARED:
            if size > plan.shared.num_parts:
                borders[path] = _SharedBorder(axis, plan.shared.num_parts)
        else:
            borders[path] = _BORDERS[module_plan.border](axis, sequence_parallel)
    return borders


def tensor_parallel_weights(
    model: nn.Module, plan: ParallelPlan, *, axis: str, size: int, sequence_parallel: bool
) -> dict[str, WeightPlan]:
    """What tensor parallelism asks of each weight, by name; arguments as in `tensor_parallel_borders`.

    Raises:
      ValueError: the plan says nothing about a weight, whose gradient might then be a part of the whole unseen.
    """
    plans = {}
    for name, _ in model.named_parameters():
        path, _, weight = name.rpartition(".")
        module_plan = plan.of(path)
        if module_plan is None or weight not in module_plan.weights:
            raise ValueError(f"the plan of tensor parallelism does not say how weight {name} lies")
        placement = module_plan.weights[weight]
        if isinstance(placement, Split):
            segments = Segments(placement.dim, placement.segments) if placement.segments > 1 else None
            plans[name] = WeightPlan(shards={axis: placement.dim}, segments=segments)
        elif placement is Whole.ON_SUM:
            plans[name] = WeightPlan(num_shares=size)
        elif placement is Whole.ON_PARTS or sequence_parallel:
            plans[name] = WeightPlan(partial=(axis,))
    return plans
