"""The names and layouts of a run's state and batch."""

import types
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from titan.models.family import BatchTensor
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec
from titan.parallel.simple_fsdp import ShardingPolicy, fsdp_placements
from titan.parallel.weight_plan import WeightPlan, WeightPlans
from titan.train.optimizers.optimizer import Optimizer
from titan.train.sharding.mesh_axes import BATCH_AXES, SEQUENCE_AXIS
from titan.train.step.stored_form import Stacks

PARAMS = "params/"
STEP = "step"
SKIPPED_STEPS = "skipped_steps"
EXPERT_BIAS = "expert_bias"

LEARNING_RATE = "learning_rate"


def per_parameter(optimizer: Optimizer) -> tuple[str, ...]:
    """Prefixes of the entries that the state has of each parameter: itself, and what the optimizer keeps of it."""
    return (PARAMS, *(f"{name}/" for name in optimizer.state))


def parameter_layouts(
    model: nn.Module,
    mesh: MeshSpec,
    policy: ShardingPolicy,
    stacks: Stacks = Stacks(),  # noqa: B008 (frozen)
    plans: WeightPlans = types.MappingProxyType({}),
) -> dict[str, TensorLayout]:
    """Fully qualified name to layout, in the model's own order; a stack is sharded as each of its parts would be.

    Raises:
      ValueError: a plan does not suit its weight.
    """
    layouts = {}
    for name, weight in model.named_parameters():
        plan = plans.get(name, WeightPlan())
        placements = fsdp_placements(tuple(weight.shape), mesh, policy, plan)
        layouts[name] = TensorLayout(plan.stored_shape(tuple(weight.shape)), weight.dtype, placements)
    return {
        name: layout.stacked(len(stacks.members[name])) if name in stacks.members else layout
        for name, layout in layouts.items()
    }


def train_state_layouts(
    parameters: dict[str, TensorLayout], optimizer: Optimizer, mesh: MeshSpec
) -> dict[str, TensorLayout]:
    """Parameters, what the optimizer keeps of each (laid out as it is), and counters of done and skipped updates."""
    layouts = {f"{kind}{name}": layout for kind in per_parameter(optimizer) for name, layout in parameters.items()}
    counter = TensorLayout((), torch.int32, replicated(mesh))
    return {**layouts, STEP: counter, SKIPPED_STEPS: counter}


def eval_state_layouts(parameters: dict[str, TensorLayout]) -> dict[str, TensorLayout]:
    """The part of the train state that an evaluation step reads."""
    return {f"{PARAMS}{name}": layout for name, layout in parameters.items()}


def expert_bias_layouts(shape: tuple[int, int] | None, mesh: MeshSpec) -> dict[str, TensorLayout]:
    """What both have besides in a run with a bias [mixtures, experts] that balances experts; nothing for None."""
    return {EXPERT_BIAS: TensorLayout(shape, torch.float32, replicated(mesh))} if shape else {}


def batch_layouts(
    tensors: Sequence[BatchTensor], shapes: Mapping[str, tuple[int, ...]], mesh: MeshSpec
) -> dict[str, TensorLayout]:
    """Layouts of a batch, in the order in which a step takes it.

    Args:
      tensors: those of the model, of which shapes are not taken.
      shapes: global shape of each tensor of the batch: [microbatch, row, position, ...] for the model's, whose rows are
        split over the batch axes and tokens over the sequence axis, and () for the float32 learning rate, where there
        is one.
    """
    layouts = {}
    for tensor in tensors:
        dims = {**dict.fromkeys(BATCH_AXES, 1), **({SEQUENCE_AXIS: 2} if tensor.tokens else {})}
        placements = tuple(Shard(dims[name]) if name in dims else Replicate() for name in mesh.axis_names)
        layouts[tensor.name] = TensorLayout(shapes[tensor.name], getattr(torch, tensor.dtype), placements)
    if LEARNING_RATE in shapes:
        layouts[LEARNING_RATE] = TensorLayout(shapes[LEARNING_RATE], torch.float32, replicated(mesh))
    return layouts


def replicated(mesh: MeshSpec) -> tuple[Replicate, ...]:
    """The placements of a tensor that every device holds whole."""
    return tuple(Replicate() for _ in mesh.axis_names)
