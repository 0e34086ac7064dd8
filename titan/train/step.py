"""The training step and the evaluation step as functions of one rank's tensors.

The loss is the sum of token losses over all ranks and microbatches divided by the number of tokens that count (those
with a label, those of pictures) in all of them: gradients are summed over ranks, never averaged, so ranks and
microbatches with different numbers of tokens count rightly.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titan.graph.capture import StepFunction, Tensors
from titan.graph.region import region
from titan.models.family import BatchTensor
from titan.parallel.layout import TensorLayout
from titan.parallel.module_borders import Borders, place_borders
from titan.parallel.simple_fsdp import ShardingPolicy, reduce_replicas, simple_fsdp
from titan.parallel.weight_plan import WeightPlans
from titan.train.adamw import adamw
from titan.train.config import OptimizerConfig
from titan.train.mesh_axes import BATCH_AXES
from titan.train.state import (
    EXP_AVG,
    EXP_AVG_SQ,
    LEARNING_RATE,
    PARAMS,
    SKIPPED_STEPS,
    STEP,
)

_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclasses.dataclass(frozen=True)
class StepBuilder:
    """Builds the steps of one model for any DeviceMesh.

    Attributes:
      build_model: makes the model on the meta device; called once for each step built, since simple_fsdp
        changes it in place.
      batch: the tensors of a batch, in the order in which the model's `loss` takes them.
      loss_module: name of the model's submodule that computes the loss.
      parameters: the layouts of its parameters.
      policy: how parameters are gathered and gradients reduced.
      optimizer: AdamW's settings.
      max_grad_norm: the global norm to clip to; 0 does not clip.
      num_microbatches: the leading dim of the batch.
      plans: what splits parameters along further axes.
      borders: collectives around modules, by path.
    """

    build_model: Callable[[], nn.Module]
    batch: Sequence[BatchTensor]
    loss_module: str
    parameters: dict[str, TensorLayout]
    policy: ShardingPolicy
    optimizer: OptimizerConfig
    max_grad_norm: float
    num_microbatches: int
    plans: WeightPlans = dataclasses.field(default_factory=dict)
    borders: Borders = dataclasses.field(default_factory=dict)

    def train_step(self, mesh: DeviceMesh | None) -> StepFunction:
        """The step `(state, batch) -> (new state, {loss, grad_norm, num_tokens, skipped_steps})`.

        A step whose gradient norm is not finite leaves weights, moments and the step counter as they are, and counts as
        skipped.
        """
        policy = dataclasses.replace(self.policy, defer_replicas=self.num_microbatches > 1)
        model = self._model(mesh, policy)

        def step(state: Tensors, batch: Tensors) -> tuple[Tensors, Tensors]:
            weights = self._weights(state, mesh)
            with region("loss"):
                num_tokens = self._sum(self._num_counted(batch), mesh, policy.data_axes)
                denominator = num_tokens.clamp(min=1).to(torch.float32)
            loss, grads = self._accumulate(model, weights, batch, denominator)
            with region("loss"):
                loss = self._sum(loss, mesh, policy.data_axes)
            with region("optimizer"):
                if policy.defer_replicas:
                    grads = self._reduce_replicas(grads, mesh)
                grad_norm = self._global_norm(grads, mesh)
                new_state = self._update(state, grads, grad_norm, batch[LEARNING_RATE])
            metrics = {"loss": loss, "grad_norm": grad_norm, "num_tokens": num_tokens}
            return new_state, {**metrics, SKIPPED_STEPS: new_state[SKIPPED_STEPS].clone()}

        return StepFunction(step, model, loss_module=self.loss_module)

    def eval_step(self, mesh: DeviceMesh | None) -> StepFunction:
        """The step `(state, batch) -> ({}, {loss_sum, num_tokens})`, sums over all ranks and microbatches."""
        model = self._model(mesh, self.policy)

        def step(state: Tensors, batch: Tensors) -> tuple[Tensors, Tensors]:
            with torch.no_grad():
                weights = self._weights(state, mesh)
                losses = [self._loss(model, weights, microbatch) for microbatch in self._microbatches(batch)]
                with region("loss"):
                    loss_sum = self._sum(_total(losses), mesh, self.policy.data_axes)
                    num_tokens = self._sum(self._num_counted(batch), mesh, self.policy.data_axes)
            return {}, {"loss_sum": loss_sum, "num_tokens": num_tokens}

        return StepFunction(step, model, loss_module=self.loss_module)

    def predict_step(self, mesh: DeviceMesh | None, inputs: Sequence[BatchTensor]) -> StepFunction:
        """The step `(state, batch) -> ({}, {prediction})`: what the model gives for all rows, whole on every rank.

        Args:
          mesh: of the step.
          inputs: the tensors that the model takes, in order; a batch has them with a leading dim of 1.
        """
        model = self._model(mesh, self.policy)

        def step(state: Tensors, batch: Tensors) -> tuple[Tensors, Tensors]:
            with torch.no_grad():
                weights = self._weights(state, mesh)
                rows = tuple(batch[tensor.name][0] for tensor in inputs)
                prediction = torch.func.functional_call(model, weights, rows).to(torch.float32)
                if mesh is not None:
                    placements = [Shard(0) if name in BATCH_AXES else Replicate() for name in mesh.mesh_dim_names]
                    prediction = DTensor.from_local(prediction, mesh, placements, run_check=False)
                    prediction = prediction.redistribute(placements=[Replicate()] * len(placements)).to_local()
            return {}, {"prediction": prediction}

        return StepFunction(step, model)

    def _model(self, mesh: DeviceMesh | None, policy: ShardingPolicy) -> nn.Module:
        model = self.build_model()
        if mesh is not None:
            place_borders(model, mesh, self.borders)
        return simple_fsdp(model, mesh, policy, self.plans)

    def _weights(self, state: Tensors, mesh: DeviceMesh | None) -> Tensors:
        """The parameters as leaves for autograd: plain tensors on one device, DTensors around the shards on a mesh."""
        weights = {}
        for name, layout in self.parameters.items():
            local = state[f"{PARAMS}{name}"].detach()
            if mesh is not None:
                local = DTensor.from_local(
                    local,
                    mesh,
                    layout.placements,
                    run_check=False,
                    shape=torch.Size(layout.shape),
                    stride=_strides(layout.shape),
                )
            weights[name] = local.requires_grad_(torch.is_grad_enabled())
        return weights

    def _num_counted(self, batch: Tensors) -> torch.Tensor:
        """The number of tokens on this rank that the loss counts."""
        (tensor,) = (tensor for tensor in self.batch if tensor.ignored is not None)
        return (batch[tensor.name] != tensor.ignored).sum()

    def _microbatches(self, batch: Tensors) -> Iterable[Tensors]:
        for index in range(self.num_microbatches):
            yield {tensor.name: batch[tensor.name][index] for tensor in self.batch}

    def _loss(self, model: nn.Module, weights: Tensors, microbatch: Tensors) -> torch.Tensor:
        return torch.func.functional_call(
            _LossOf(model),
            {f"model.{name}": weight for name, weight in weights.items()},
            tuple(microbatch[tensor.name] for tensor in self.batch),
        )

    def _accumulate(
        self, model: nn.Module, weights: Tensors, batch: Tensors, denominator: torch.Tensor
    ) -> tuple[torch.Tensor, Tensors]:
        losses = []
        grads: Tensors = {}
        for microbatch in self._microbatches(batch):
            loss = self._loss(model, weights, microbatch)
            with region("loss"):
                loss = loss / denominator
            with region("backward"):
                new = {
                    name: grad.to_local() if isinstance(grad, DTensor) else grad
                    for name, grad in zip(weights, torch.autograd.grad(loss, list(weights.values())))
                }
                grads = {name: grads[name] + grad for name, grad in new.items()} if grads else new
            losses.append(loss.detach())
        return _total(losses), grads

    def _reduce_replicas(self, grads: Tensors, mesh: DeviceMesh | None) -> Tensors:
        """The sum over replicas of accumulated gradients, in the policy's `reduce_dtype` as every other sum of them."""
        if mesh is None or self.policy.replicate_axis not in mesh.mesh_dim_names:
            return grads
        reduced = {}
        for name, grad in grads.items():
            layout = self.parameters[name]
            placements = [
                Partial() if axis == self.policy.replicate_axis else placement
                for axis, placement in zip(mesh.mesh_dim_names, layout.placements)
            ]
            partial = DTensor.from_local(
                grad.to(self.policy.reduce_dtype or grad.dtype),
                mesh,
                placements,
                run_check=False,
                shape=torch.Size(layout.shape),
                stride=_strides(layout.shape),
            )
            reduced[name] = reduce_replicas(partial).to_local().to(grad.dtype)
        return reduced

    def _sum(self, value: torch.Tensor, mesh: DeviceMesh | None, axes: Iterable[str]) -> torch.Tensor:
        """The sum of each rank's `value` over the named mesh axes."""
        if mesh is None:
            return value
        partial = [Partial() if name in axes else Replicate() for name in mesh.mesh_dim_names]
        return reduce_replicas(DTensor.from_local(value, mesh, partial, run_check=False)).to_local()

    def _global_norm(self, grads: Tensors, mesh: DeviceMesh | None) -> torch.Tensor:
        """The Euclidean norm of all gradients together; each element counts once, however its tensor is laid out."""
        squares: dict[tuple[str, ...], list[torch.Tensor]] = {}
        for name, grad in grads.items():
            placements = self.parameters[name].placements
            axes = tuple(axis for axis, p in zip(mesh.mesh_dim_names, placements) if p.is_shard()) if mesh else ()
            squares.setdefault(axes, []).append(grad.to(torch.float32).square().sum())
        return _total([self._sum(_total(values), mesh, axes) for axes, values in squares.items()]).sqrt()

    def _update(self, state: Tensors, grads: Tensors, grad_norm: torch.Tensor, learning_rate: torch.Tensor) -> Tensors:
        finite = torch.isfinite(grad_norm)
        scale = None
        if self.max_grad_norm:
            scale = (self.max_grad_norm / (grad_norm + _CLIP_EPSILON)).clamp(max=1.0)
        step = state[STEP] + 1
        new: Tensors = {}
        for name, grad in grads.items():
            keys = (f"{PARAMS}{name}", f"{EXP_AVG}{name}", f"{EXP_AVG_SQ}{name}")
            old = [state[key] for key in keys]
            updated = adamw(
                old[0],
                grad if scale is None else grad * scale,
                old[1],
                old[2],
                step=step.to(torch.float32),
                learning_rate=learning_rate,
                beta1=self.optimizer.beta1,
                beta2=self.optimizer.beta2,
                epsilon=self.optimizer.epsilon,
                weight_decay=self.optimizer.weight_decay,
            )
            new.update({key: torch.where(finite, after, before) for key, after, before in zip(keys, updated, old)})
        new[STEP] = torch.where(finite, step, state[STEP])
        new[SKIPPED_STEPS] = state[SKIPPED_STEPS] + (~finite).to(torch.int32)
        return new


class _LossOf(nn.Module):
    """Makes `model.loss` the forward, which is what functional_call calls."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.model.loss(*batch)


def _total(values: list[torch.Tensor]) -> torch.Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).sum()


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
