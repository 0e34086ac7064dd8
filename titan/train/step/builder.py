"""The training step and the evaluation step as functions of one rank's tensors.

The loss is the sum of token losses over all ranks and microbatches divided by the number of tokens that count (those
with a label, those of images) in all of them: gradients are summed over ranks, never averaged, so ranks and
microbatches with different numbers of tokens count rightly.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan.graph.capture.trace import StepFunction, Tensors
from titan.graph.ir.region import region
from titan.models.family import BatchTensor
from titan.models.layers.routing_tally import RoutingTally
from titan.parallel.layout import TensorLayout
from titan.parallel.module_boundaries import Borders, place_borders
from titan.parallel.simple_fsdp import ShardingPolicy, simple_fsdp
from titan.parallel.weight_plan import WeightPlans
from titan.train.optimizers.optimizer import Optimizer
from titan.train.sharding.mesh_axes import BATCH_AXES, SEQUENCE_AXIS
from titan.train.step.expert_balance import ExpertBalance
from titan.train.step.gradients import (
    around_shard,
    clip_scale,
    global_norm,
    mesh_sum,
    total,
    with_replicas_summed,
)
from titan.train.step.state import EXPERT_BIAS, LEARNING_RATE, PARAMS, SKIPPED_STEPS, STEP, per_parameter


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
      optimizer: how a parameter is updated.
      max_grad_norm: the global norm to clip to; 0 does not clip.
      num_microbatches: the leading dim of the batch.
      plans: what splits parameters along further axes.
      borders: collectives around modules, by path.
      balance: how the experts of a mixture are balanced; None for a model without experts.
    """

    build_model: Callable[[], nn.Module]
    batch: Sequence[BatchTensor]
    loss_module: str
    parameters: dict[str, TensorLayout]
    policy: ShardingPolicy
    optimizer: Optimizer
    max_grad_norm: float
    num_microbatches: int
    plans: WeightPlans = dataclasses.field(default_factory=dict)
    borders: Borders = dataclasses.field(default_factory=dict)
    balance: ExpertBalance | None = None

    def train_step(self, mesh: DeviceMesh | None) -> StepFunction:
        """The step `(state, batch) -> (new state, {loss, grad_norm, num_tokens, skipped_steps})`.

        For a mixture of experts the metrics have what `ExpertBalance.metrics` gives too, and the `auxiliary_loss`
        where there is one; it is no part of `loss`. A step whose gradient norm is not finite leaves weights, moments,
        the experts' bias and the step counter as they are, and counts as skipped.
        """
        policy = dataclasses.replace(self.policy, defer_replicas=self.num_microbatches > 1)
        model = self._model(mesh, policy)

        def step(state: Tensors, batch: Tensors) -> tuple[Tensors, Tensors]:
            weights = self._weights(state, mesh)
            with region("loss"):
                num_tokens = mesh_sum(self._num_counted(batch), mesh, policy.data_axes)
                denominator = num_tokens.clamp(min=1).to(torch.float32)
            losses, grads, routing = self._accumulate(model, weights, state.get(EXPERT_BIAS), batch, denominator, mesh)
            with region("loss"):
                losses = {name: mesh_sum(loss, mesh, policy.data_axes) for name, loss in losses.items()}
            with region("optimizer"):
                if policy.defer_replicas:
                    grads = with_replicas_summed(grads, self.parameters, policy, mesh)
                grad_norm = global_norm(grads, self.parameters, mesh)
                new_state = self._update(state, grads, grad_norm, batch[LEARNING_RATE])
                if EXPERT_BIAS in state:
                    bias = self.balance.next_bias(state[EXPERT_BIAS], routing["chosen_LX"])
                    new_state[EXPERT_BIAS] = torch.where(torch.isfinite(grad_norm), bias, state[EXPERT_BIAS])
                told = self.balance.metrics(**routing) if self.balance else {}
            metrics = {**losses, "grad_norm": grad_norm, "num_tokens": num_tokens, **told}
            return new_state, {**metrics, SKIPPED_STEPS: new_state[SKIPPED_STEPS].clone()}

        return StepFunction(step, model, loss_module=self.loss_module)

    def eval_step(self, mesh: DeviceMesh | None) -> StepFunction:
        """The step `(state, batch) -> ({}, {loss_sum, num_tokens})`, sums over all ranks and microbatches."""
        model = self._model(mesh, self.policy)

        def step(state: Tensors, batch: Tensors) -> tuple[Tensors, Tensors]:
            with torch.no_grad():
                weights, bias = self._weights(state, mesh), state.get(EXPERT_BIAS)
                losses = [self._loss(model, weights, bias, microbatch)[0] for microbatch in self._microbatches(batch)]
                with region("loss"):
                    loss_sum = mesh_sum(total(losses), mesh, self.policy.data_axes)
                    num_tokens = mesh_sum(self._num_counted(batch), mesh, self.policy.data_axes)
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
                    dims = {**dict.fromkeys(BATCH_AXES, 0), SEQUENCE_AXIS: 1}
                    placements = [Shard(dims[name]) if name in dims else Replicate() for name in mesh.mesh_dim_names]
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
                local = around_shard(local, mesh, layout, layout.placements)
            weights[name] = local.requires_grad_(torch.is_grad_enabled())
        return weights

    def _num_counted(self, batch: Tensors) -> torch.Tensor:
        """The number of tokens on this rank that the loss counts."""
        (tensor,) = (tensor for tensor in self.batch if tensor.ignored is not None)
        return (batch[tensor.name] != tensor.ignored).sum()

    def _microbatches(self, batch: Tensors) -> Iterable[Tensors]:
        for index in range(self.num_microbatches):
            yield {tensor.name: batch[tensor.name][index] for tensor in self.batch}

    def _loss(
        self, model: nn.Module, weights: Tensors, bias: torch.Tensor | None, microbatch: Tensors
    ) -> tuple[torch.Tensor, RoutingTally | None]:
        """This rank's sum of losses, and what the routers did if the model has any."""
        tensors = tuple(microbatch[tensor.name] for tensor in self.batch)
        routing = (self.balance.start(tensors[0].device), bias) if self.balance else ()
        result = torch.func.functional_call(
            _LossOf(model), {f"model.{name}": weight for name, weight in weights.items()}, (*tensors, *routing)
        )
        return result if self.balance else (result, None)

    def _accumulate(
        self,
        model: nn.Module,
        weights: Tensors,
        bias: torch.Tensor | None,
        batch: Tensors,
        denominator: torch.Tensor,
        mesh: DeviceMesh | None,
    ) -> tuple[Tensors, Tensors, Tensors]:
        """Losses of this rank, gradients, and what the routers of all ranks did; of all microbatches."""
        losses: Tensors = {}
        grads: Tensors = {}
        routing: Tensors = {}
        for microbatch in self._microbatches(batch):
            loss, tally = self._loss(model, weights, bias, microbatch)
            with region("loss"):
                objective = loss / denominator
                parts = {"loss": objective.detach()}
                if tally is not None:
                    told = self._summed_tally(tally, mesh)
                    routing = _sums(routing, told)
                    if self.balance.config.auxiliary_loss:
                        auxiliary = self.balance.auxiliary_loss(tally.probabilities_X, told["chosen_LX"])
                        parts["auxiliary_loss"] = auxiliary.detach() / self.num_microbatches
                        objective = objective + self._auxiliary_weight(mesh) * auxiliary
                losses = _sums(losses, parts)
            with region("backward"):
                found = torch.autograd.grad(objective, list(weights.values()))
                new = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in zip(weights, found, strict=True)}
                grads = _sums(grads, new)
        return losses, grads, routing

    def _auxiliary_weight(self, mesh: DeviceMesh | None) -> float:
        """What a microbatch's auxiliary loss is multiplied by in what gradients are taken of.

        Devices with the same tokens (tensor parallelism) have all the loss of these tokens each, but gradients of
        their router as parts of a sum.
        """
        sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) if mesh else {}
        num_equal = math.prod(size for axis, size in sizes.items() if axis not in self.policy.data_axes)
        return self.balance.config.auxiliary_loss / (self.num_microbatches * num_equal)

    def _summed_tally(self, tally: RoutingTally, mesh: DeviceMesh | None) -> Tensors:
        """The arguments of `ExpertBalance.metrics`: sums over all ranks."""
        mine = {
            "chosen_LX": tally.chosen_LX,
            "dropped": tally.dropped.to(torch.float32),  # all ranks' may be more than an int32 holds
            "entropy": tally.entropy.detach(),
        }
        return {name: mesh_sum(value, mesh, self.policy.data_axes) for name, value in mine.items()}

    def _update(self, state: Tensors, grads: Tensors, grad_norm: torch.Tensor, learning_rate: torch.Tensor) -> Tensors:
        finite = torch.isfinite(grad_norm)
        scale = clip_scale(grad_norm, self.max_grad_norm)
        step = state[STEP] + 1
        new: Tensors = {}
        for name, grad in grads.items():
            keys = [f"{kind}{name}" for kind in per_parameter(self.optimizer)]
            weight, *kept = old = [state[key] for key in keys]
            updated, kept = self.optimizer.update(
                weight,
                grad if scale is None else grad * scale,
                tuple(kept),
                step=step.to(torch.float32),
                learning_rate=learning_rate,
            )
            for key, after, before in zip(keys, (updated, *kept), old, strict=True):
                new[key] = torch.where(finite, after, before)
        new[STEP] = torch.where(finite, step, state[STEP])
        new[SKIPPED_STEPS] = state[SKIPPED_STEPS] + (~finite).to(torch.int32)
        return new


class _LossOf(nn.Module):
    """Makes `model.loss`, or with a tally `model.routed_loss`, the forward, which is what functional_call calls."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args):
        is_routed = any(isinstance(arg, RoutingTally) for arg in args)
        return self.model.routed_loss(*args) if is_routed else self.model.loss(*args)


def _sums(totals: Tensors, new: Tensors) -> Tensors:
    """With what came before, if anything did."""
    return {name: totals[name] + value for name, value in new.items()} if totals else new
