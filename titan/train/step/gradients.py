"""What becomes of gradients between the backward pass and the optimizer, on one rank of a mesh."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from titan.parallel.layout import TensorLayout
from titan.parallel.simple_fsdp import ShardingPolicy, reduce_replicas

_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


def mesh_sum(value: torch.Tensor, mesh: DeviceMesh | None, axes: Iterable[str]) -> torch.Tensor:
    """The sum of each rank's `value` over the named mesh axes."""
    if mesh is None:
        return value
    partial = [Partial() if name in axes else Replicate() for name in mesh.mesh_dim_names]
    return reduce_replicas(DTensor.from_local(value, mesh, partial, run_check=False)).to_local()


def total(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of 0-d tensors."""
    return values[0] if len(values) == 1 else torch.stack(list(values)).sum()


def around_shard(local: torch.Tensor, mesh: DeviceMesh, layout: TensorLayout, placements: Sequence) -> DTensor:
    """A DTensor of the layout's whole shape around this rank's part, without communication."""
    # With an explicit shape and stride, tracing allocates nothing.
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(layout.shape), stride=_strides(layout.shape)
    )


def with_replicas_summed(
    grads: Mapping[str, torch.Tensor],
    parameters: Mapping[str, TensorLayout],
    policy: ShardingPolicy,
    mesh: DeviceMesh | None,
) -> dict[str, torch.Tensor]:
    """The sum over replicas of accumulated gradients, in the policy's `reduce_dtype` as every other sum of them."""
    if mesh is None or policy.replicate_axis not in mesh.mesh_dim_names:
        return dict(grads)
    reduced = {}
    for name, grad in grads.items():
        layout = parameters[name]
        placements = [
            Partial() if axis == policy.replicate_axis else placement
            for axis, placement in zip(mesh.mesh_dim_names, layout.placements, strict=True)
        ]
        partial = around_shard(grad.to(policy.reduce_dtype or grad.dtype), mesh, layout, placements)
        reduced[name] = reduce_replicas(partial).to_local().to(grad.dtype)
    return reduced


def global_norm(
    grads: Mapping[str, torch.Tensor], parameters: Mapping[str, TensorLayout], mesh: DeviceMesh | None
) -> torch.Tensor:
    """The Euclidean norm of all gradients together; each element counts once, however its tensor is laid out."""
    squares: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for name, grad in grads.items():
        axes: tuple[str, ...] = ()
        if mesh:
            placed = zip(mesh.mesh_dim_names, parameters[name].placements, strict=True)
            axes = tuple(axis for axis, placement in placed if placement.is_shard())
        squares.setdefault(axes, []).append(grad.to(torch.float32).square().sum())
    return total([mesh_sum(total(values), mesh, axes) for axes, values in squares.items()]).sqrt()


def clip_scale(grad_norm: torch.Tensor, max_grad_norm: float) -> torch.Tensor | None:
    """The factor that brings gradients of this norm to at most `max_grad_norm`; None for 0, which is no limit."""
    if not max_grad_norm:
        return None
    return (max_grad_norm / (grad_norm + _CLIP_EPSILON)).clamp(max=1.0)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
