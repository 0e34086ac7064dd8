"""Collectives along one mesh axis, with their gradients.

Along an axis a tensor is whole (equal on all devices), a slice, or a part of a sum; the gradient of a whole tensor is
whole, or a part of a sum, as the names of the functions say. The gradient of a slice is the slice's.
"""

import torch
from torch import Tensor

from titan.parallel.along import all_gather_along, reduce_scatter_along
from titan.parallel.mesh_axis import MeshAxis

_OPS = torch.ops._c10d_functional


def sum_parts(x: Tensor, axis: MeshAxis) -> Tensor:
    """The whole sum of parts; its gradient is whole, and is that of each part."""
    return _SumParts.apply(x, axis)


def to_parts(x: Tensor, axis: MeshAxis) -> Tensor:
    """A whole tensor as it is, for work of which each device does a part: its gradient is the sum of the parts'."""
    return _ToParts.apply(x, axis)


def gather_to_parts(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """The whole of slices along a dim, for work of which each device does a part; gradients are summed and sliced."""
    return _GatherToParts.apply(x, axis, dim)


def gather_whole(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """The whole of slices along a dim, for work that all devices do: the gradient is whole too, and is sliced."""
    return _GatherWhole.apply(x, axis, dim)


def scatter_sum(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """This device's slice along a dim of the sum of parts; the axis's size divides that dim."""
    return _ScatterSum.apply(x, axis, dim)


def exchange(x: Tensor, axis: MeshAxis) -> Tensor:
    """As many equal blocks along the first dim as the axis has devices, one for each: those that all have for this one.

    The gradient of what was sent comes back from where it went. A tensor without one may be of any dtype.
    """
    return _Exchange.apply(x, axis)


def maximum(x: Tensor, axis: MeshAxis) -> Tensor:
    """The largest of each element along the axis; without a gradient."""
    return _all_reduce(x.detach(), "max", axis)


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: MeshAxis) -> Tensor:
        return _all_reduce(x, "sum", axis)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class _ToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_reduce(grad, "sum", ctx.axis), None


class _GatherToParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather_along(x, dim, axis.size, axis.group_name)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return reduce_scatter_along(grad, ctx.dim, ctx.axis.size, ctx.axis.group_name), None, None


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather_along(x, dim, axis.size, axis.group_name)

    @staticmethod
    def backward(ctx, grad: Tensor):
        slices = grad.unflatten(ctx.dim, (ctx.axis.size, -1))
        return slices.index_select(ctx.dim, ctx.axis.index().reshape(1)).squeeze(ctx.dim), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter_along(x, dim, axis.size, axis.group_name)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_gather_along(grad, ctx.dim, ctx.axis.size, ctx.axis.group_name), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return _all_to_all(x, axis)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_to_all(grad, ctx.axis), None


def _all_to_all(x: Tensor, axis: MeshAxis) -> Tensor:
    splits = [x.shape[0] // axis.size] * axis.size
    return _OPS.wait_tensor(_OPS.all_to_all_single(x.contiguous(), splits, splits, axis.group_name))


def _all_reduce(x: Tensor, op: str, axis: MeshAxis) -> Tensor:
    return _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), op, axis.group_name))
