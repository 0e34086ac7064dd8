"""SimpleFSDP: data parallelism as a parametrisation of a module's weights by DTensors.

A weight is stored as a DTensor, sharded along some mesh axes and replicated along another; reading it gives the full
weight as a plain tensor (an all-gather), and the backward of that read turns each device's partial gradient into the
gradient of its shard (a reduce-scatter, then an all-reduce over replicas). The module's own code never sees a mesh.
FSDP, HSDP and DDP are the same code on a mesh with shard axes, with both kinds, or with the replicate axis alone.
The idea is that of SimpleFSDP (https://arxiv.org/abs/2411.00284).

Tensor and expert parallelism split weights along further axes. What they ask of a weight is a `WeightPlan`; the module
then sees its device's slice.

A dim that the shard axes do not divide is never padded: padding would give ranks different local shapes, and one SPMD
program could not serve them all. `fsdp_placements` takes the first dim that the axes divide, and replicates a weight
that has none.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from titan.parallel.along import all_gather_along, reduce_scatter_along
from titan.parallel.mesh import MeshSpec
from titan.parallel.trace_mark import traced_as
from titan.parallel.weight_plan import WeightPlan, WeightPlans


@dataclasses.dataclass(frozen=True)
class ShardingPolicy:
    """How a weight is gathered and its gradient reduced.

    Attributes:
      shard_axes: the mesh axes along which weights are sharded, outermost first; none in the mesh means not sharded
        (DDP).
      replicate_axis: the mesh axis along which weights are replicated; absent from the mesh means one replica (FSDP).
      gather_dtype: the dtype in which a weight is gathered and used; None keeps the weight's own.
      reduce_dtype: the dtype in which gradients are reduced; None keeps the gradient's own.
      average: divide the reduced gradient by the number of data-parallel devices. Leave it off where the loss is
        already divided by the global count of tokens, which alone is right when ranks hold different numbers of tokens.
      defer_replicas: leave gradients partial along the replicate axis. The caller accumulates microbatches and then
        calls `reduce_replicas` once, instead of paying one all-reduce a microbatch.

    Raises:
      ValueError: the replicate axis is among the shard axes.
    """

    shard_axes: tuple[str, ...] = ("dp_shard",)
    replicate_axis: str = "dp_replicate"
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    average: bool = False
    defer_replicas: bool = False

    def __post_init__(self) -> None:
        if self.replicate_axis in self.shard_axes:
            raise ValueError(f"weights are either sharded or replicated along axis {self.replicate_axis}, not both")

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which gradients are summed, in that order: the first sums leave a smaller tensor."""
        return (*self.shard_axes, self.replicate_axis)


def fsdp_placements(
    shape: tuple[int, ...],
    mesh: MeshSpec,
    policy: ShardingPolicy,
    plan: WeightPlan = WeightPlan(),  # noqa: B008 (frozen)
) -> tuple[Placement, ...]:
    """The placements of a stored weight: sharded on the first dim that the shard axes divide, else replicated.

    A weight in segments is stored as a stack of them, whose first dim no axis shards. A dim that the plan splits is no
    dim for the shard axes, nor is an axis of the plan's a shard axis of this weight.

    Args:
      shape: the weight's global shape.
      mesh: the mesh; axes that are neither the policy's shard axes nor the plan's replicate.
      policy: names the shard axes.
      plan: what splits the weight besides.

    Raises:
      ValueError: an axis of the plan's does not divide the dim that it splits, or there are no such segments.
    """
    if plan.segments is not None:
        of_segment = dataclasses.replace(plan, segments=None)
        placements = fsdp_placements(plan.stored_shape(shape)[1:], mesh, policy, of_segment)
        return tuple(Shard(p.dim + 1) if isinstance(p, Shard) else p for p in placements)
    for axis, dim in plan.shards.items():
        if shape[dim] % mesh.size(axis):
            raise ValueError(f"{axis}={mesh.size(axis)} does not divide dim {dim} of a weight of shape {shape}")
    axes = [axis for axis in policy.shard_axes if axis not in plan.shards]
    size = math.prod(map(mesh.size, axes))
    free = [dim for dim in range(len(shape)) if dim not in plan.shards.values()]
    shard = next((dim for dim in free if shape[dim] > 0 and shape[dim] % size == 0), None)
    dims = {**(dict.fromkeys(axes, shard) if shard is not None else {}), **plan.shards}
    return tuple(Shard(dims[name]) if name in dims else Replicate() for name in mesh.axis_names)


class _ReadWeight(torch.autograd.Function):
    """Full weight from its shard; gradient of the shard from the partial gradient of the full weight."""

    @staticmethod
    def forward(ctx, weight: DTensor, policy: ShardingPolicy, plan: WeightPlan) -> torch.Tensor:
        ctx.weight_dtype = weight.dtype
        ctx.mesh = weight.device_mesh
        ctx.placements = weight.placements
        ctx.shape, ctx.stride = weight.shape, weight.stride()
        ctx.policy, ctx.plan = policy, plan
        placements = ctx.placements
        with traced_as("parameter_gather"):  # it may be gathered again rather than kept
            if policy.gather_dtype is not None:
                weight = weight.to(policy.gather_dtype)
            # One axis at a time, the inner ones first: DTensor would warn of a mesh that could be flattened.
            for dim, name in reversed(list(enumerate(ctx.mesh.mesh_dim_names))):
                if placements[dim].is_shard() and name not in plan.shards:
                    weight = _redistribute(weight, dim, Replicate())
            full = weight.to_local()
            if plan.segments is not None:
                full = plan.segments.joined(full)
            if plan.num_shares > 1:
                full = full / plan.num_shares
        # Where there was nothing to gather this is the stored tensor itself, and autograd would make it part of the
        # graph.
        return full.detach()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        policy, plan, mesh = ctx.policy, ctx.plan, ctx.mesh
        summed = [
            name for name in (*policy.shard_axes, *plan.partial, policy.replicate_axis) if name not in plan.shards
        ]
        placements = [
            Partial() if name in summed else placement
            for name, placement in zip(mesh.mesh_dim_names, ctx.placements, strict=True)
        ]
        if policy.reduce_dtype is not None:
            grad = grad.to(policy.reduce_dtype)
        if plan.segments is not None:
            grad = plan.segments.cut(grad)
        reduced = DTensor.from_local(
            grad.contiguous(), mesh, placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )
        for name in summed:
            if name not in mesh.mesh_dim_names or (name == policy.replicate_axis and policy.defer_replicas):
                continue
            dim = mesh.mesh_dim_names.index(name)
            reduced = _redistribute(reduced, dim, ctx.placements[dim])
        reduced = reduced.to(ctx.weight_dtype)
        return reduced / _num_data_devices(mesh, policy) if policy.average else reduced, None, None


def _num_data_devices(mesh: DeviceMesh, policy: ShardingPolicy) -> int:
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    return math.prod(sizes.get(axis, 1) for axis in policy.data_axes)


def _redistribute(tensor: DTensor, axis: int, placement: Placement) -> DTensor:
    """With another placement along one axis of the mesh: gathers a shard, or sums parts."""
    mesh, before = tensor.device_mesh, tensor.placements[axis]
    placements = [*tensor.placements[:axis], placement, *tensor.placements[axis + 1 :]]
    sharded = before if before.is_shard() else placement
    if not sharded.is_shard() or sharded.dim == 0:
        return tensor.redistribute(placements=placements)
    # DTensor communicates along the first dim, and puts slices of another one below each other. On TPUs rows of a few
    # elements, such as those of a weight's slice for one of many devices, are padded to 128.
    along = all_gather_along if before.is_shard() else reduce_scatter_along
    local = along(tensor.to_local(), sharded.dim, mesh.size(axis), mesh.get_group(axis).group_name)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def reduce_replicas(grad: DTensor) -> DTensor:
    """Sums a tensor over every mesh axis along which it is still partial (see `ShardingPolicy.defer_replicas`)."""
    placements = list(grad.placements)
    for axis, placement in enumerate(grad.placements):
        if placement.is_partial():
            placements[axis] = Replicate()
            grad = grad.redistribute(placements=placements)
    return grad


def _weight_property(name: str) -> property:
    def read(self: nn.Module) -> torch.Tensor | None:
        weight, policy = self._parameters[name], self.__dict__[_POLICY]
        if isinstance(weight, DTensor):
            return _ReadWeight.apply(weight, policy, self.__dict__[_PLANS].get(name, WeightPlan()))
        # One device, or a plain tensor put in the weight's place, by torch.func.functional_call for one.
        return weight if weight is None or policy.gather_dtype is None else weight.to(policy.gather_dtype)

    return property(read)


_POLICY = "_simple_fsdp_policy"
_PLANS = "_simple_fsdp_plans"


@functools.cache
def _parametrised(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    # One class for all modules of a kind, or torch.compile would compile each of them anew. It holds no mesh and no
    # policy: those are the stored DTensor's and the instance's.
    members = {name: _weight_property(name) for name in names}
    return type(base.__name__, (base,), {"__module__": base.__module__, **members})


def simple_fsdp(
    module: nn.Module,
    mesh: DeviceMesh | None,
    policy: ShardingPolicy | None = None,
    plans: WeightPlans | None = None,
) -> nn.Module:
    """Parametrises every weight of `module`, in place, and returns it.

    State-dict keys stay the module's own; on a mesh the values become DTensors. Weights on the meta device stay there.
    A real weight must be equal on every rank, since each rank keeps its own slice of it. A weight tied between
    submodules stays one weight if one call sees all of them.

    Args:
      module: any module; its code needs no change.
      mesh: a DeviceMesh with named axes. None is one device: weights stay plain tensors and, as on a mesh, are used in
        the policy's `gather_dtype`, so that the precision does not depend on the number of devices.
      policy: axes and dtypes; the default shards along `dp_shard` and replicates along `dp_replicate`.
      plans: what splits weights along further axes, by name in `module`; the module's code must suit the slices.

    Raises:
      ValueError: the mesh has no axis names or none of the policy's or the plans' axes, a plan names no weight or does
        not suit its weight, or the module, or a part of it, is parametrised already. The module is then as it was.
    """
    policy, plans = policy or ShardingPolicy(), plans or {}
    if mesh is not None:
        _check_axes(mesh, policy, plans)
    submodules = {name: submodule for name, submodule in module.named_modules() if _weight_names(submodule)}
    for name, submodule in submodules.items():
        if _POLICY in submodule.__dict__:
            raise ValueError(f"module {name or type(submodule).__name__} is parametrised by simple_fsdp already")
    by_module = {name: _plans_of(name, submodule, plans) for name, submodule in submodules.items()}
    if unknown := set(plans) - {_join(name, weight) for name, own in by_module.items() for weight in own}:
        raise ValueError(f"there is no weight {sorted(unknown)[0]} to follow its plan")
    if mesh is not None:
        _distribute([(submodule, by_module[name]) for name, submodule in submodules.items()], mesh, policy)
    for name, submodule in submodules.items():
        submodule.__class__ = _parametrised(type(submodule), _weight_names(submodule))
        submodule.__dict__[_POLICY] = policy
        submodule.__dict__[_PLANS] = by_module[name]
    return module


def _join(module_name: str, weight_name: str) -> str:
    return f"{module_name}.{weight_name}" if module_name else weight_name


def _plans_of(module_name: str, submodule: nn.Module, plans: WeightPlans) -> dict[str, WeightPlan]:
    """The plans of a module's own weights, by their names in it."""
    names = {name: _join(module_name, name) for name in _weight_names(submodule)}
    return {name: plans[fqn] for name, fqn in names.items() if fqn in plans}


def _check_axes(mesh: DeviceMesh, policy: ShardingPolicy, plans: WeightPlans) -> None:
    if mesh.mesh_dim_names is None:
        raise ValueError("simple_fsdp needs a DeviceMesh with mesh_dim_names")
    planned = {axis for plan in plans.values() for axis in (*plan.shards, *plan.partial)}
    if missing := sorted(planned - set(mesh.mesh_dim_names)):
        raise ValueError(f"a plan names the axis {missing[0]}; the mesh has {', '.join(mesh.mesh_dim_names)}")
    shard_axes = [axis for axis in policy.shard_axes if axis in mesh.mesh_dim_names]
    if shard_axes != sorted(shard_axes, key=mesh.mesh_dim_names.index):
        # Slices lie in the mesh's order, and gradients are scattered in that of the policy.
        raise ValueError(
            f"the policy's shard axes {', '.join(shard_axes)} are not in the order of the mesh's, "
            f"{', '.join(mesh.mesh_dim_names)}"
        )
    if not {*policy.data_axes, *planned} & set(mesh.mesh_dim_names):
        raise ValueError(
            f"the mesh has the axes {', '.join(mesh.mesh_dim_names)}, none of the policy's "
            f"{', '.join(policy.data_axes)}: gradients would not be reduced"
        )


def _distribute(
    submodules: Iterable[tuple[nn.Module, Mapping[str, WeightPlan]]], mesh: DeviceMesh, policy: ShardingPolicy
) -> None:
    """Puts a DTensor in the place of each weight; a weight that submodules share stays one, with the first's plan."""
    spec = MeshSpec(tuple(mesh.mesh_dim_names), tuple(mesh.shape))
    shared: dict[torch.Tensor, nn.Parameter] = {}
    placed: list[tuple[nn.Module, str, nn.Parameter]] = []
    for submodule, plans in submodules:
        for name in _weight_names(submodule):
            weight = submodule._parameters[name]
            if weight not in shared:
                plan = plans.get(name, WeightPlan())
                placements = fsdp_placements(tuple(weight.shape), spec, policy, plan)
                stored = weight.detach() if plan.segments is None else plan.segments.cut(weight.detach())
                shared[weight] = nn.Parameter(_shard(stored, mesh, placements), weight.requires_grad)
            placed.append((submodule, name, shared[weight]))
    for submodule, name, weight in placed:
        submodule._parameters[name] = weight


def _weight_names(submodule: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, weight in submodule._parameters.items() if weight is not None)


def _shard(weight: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """This rank's slice of a full weight, without communication."""
    local = weight
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            size = mesh.size(axis)
            # On the meta device only the shape counts, and the rank's coordinate must leave no trace in it.
            index = 0 if weight.is_meta else mesh.get_local_rank(axis)
            local = local.chunk(size, placement.dim)[index]
    # A slice is copied, since it would keep the full weight in memory.
    local = local.contiguous() if local is weight else local.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=weight.shape, stride=weight.contiguous().stride()
    )
