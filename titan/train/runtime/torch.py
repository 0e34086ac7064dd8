"""The processes of the torch executor: one per device, on CPU over gloo. The reference for the xla executor."""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan.core.config.validate import ConfigError
from titan.core.init import Initializer, sample
from titan.core.metrics import MetricsConfig, Peak, resolve_peak
from titan.graph.capture.trace import StepFunction, Tensors
from titan.graph.executors.torch import TorchExecutable, local_shard, place_local
from titan.graph.ir.step_graph import StepGraph
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec
from titan.train._compat import has_cpp_compiler
from titan.train.config.run import Config
from titan.train.runtime.interface import Runtime
from titan.train.step.state import PARAMS
from titan.train.step.stored_form import Stacks


@dataclasses.dataclass(frozen=True)
class UncapturedStep:
    """A step run by PyTorch as it stands; an `Executable`.

    Attributes:
      step: what is run.
      place: makes this process's rows of a batch this rank's tensors.
    """

    step: StepFunction
    place: Callable[[Mapping[str, np.ndarray]], Tensors]

    def __call__(self, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
        """Runs the step on this rank's shards."""
        return self.step.call(dict(state), dict(batch))


class TorchRuntime(Runtime):
    """One process of a run, which is one device; `titan.train.runtime.launch` starts the others."""

    executor = "torch"

    def __init__(self, config: Config):
        """Reads from RANK and WORLD_SIZE which process of how many this is; without them it is alone."""
        self.process_count = int(os.environ.get("WORLD_SIZE", "1"))
        self.process_index = int(os.environ.get("RANK", "0"))
        self.num_devices = self.process_count
        self.device_kind = "cpu (PyTorch)"
        self.saves = self.process_index == 0
        self._compile_blocks = config.compile.enable
        self._device_mesh: DeviceMesh | None = None

    def prepare(self, spec: MeshSpec, layouts: Mapping[str, TensorLayout], stacks: Stacks) -> None:
        """Fixes the mesh of everything that follows, the layout of each entry of the state, and which are stacked.

        The process group is started when the first step runs.
        """
        self._spec, self._layouts, self._stacks = spec, dict(layouts), stacks
        self.device_processes = range(self.process_count)
        # With a process group running nothing can be captured (see `fake_world`).
        self.captures_late = not spec.axis_names

    def compile(self, graph: StepGraph, seconds: dict[str, float]) -> TorchExecutable:
        """The captured graph, bound to the process groups of the mesh; there is nothing to lower or compile."""
        return TorchExecutable(graph, self._mesh)

    def uncaptured(
        self, make_step: Callable[[DeviceMesh | None], StepFunction], batch: Mapping[str, TensorLayout]
    ) -> UncapturedStep:
        """The step without capture: eager, or with each block of the model under torch.compile."""
        step = make_step(self._mesh())
        if self._compile_blocks:
            _check_cpp_compiler()
            for blocks in [module for module in step.module.modules() if isinstance(module, nn.ModuleList)]:
                for block in blocks:
                    block.compile()
        return UncapturedStep(step, lambda arrays: place_local(arrays, batch, self._spec, self.process_index))

    def _mesh(self) -> DeviceMesh | None:
        # Capture needs a process without a process group, so the group is made after it and only once.
        if self._device_mesh is None and self._spec.axis_names:
            dist.init_process_group("gloo")
            self._device_mesh = self._spec.device_mesh("cpu")
        return self._device_mesh

    def initial_state(self, plan: Mapping[str, Initializer], seed: int) -> dict[str, torch.Tensor]:
        """This rank's shards of the parameters, with the values that the xla executor begins from; the rest is zero."""
        state = {}
        for name, layout in self._layouts.items():
            if name.startswith(PARAMS):
                sampled = self._sampled(name, layout, plan, seed)
                state[name] = local_shard(sampled, layout, self._spec, self.process_index)
            else:
                state[name] = torch.zeros(layout.local_shape(self._spec), dtype=layout.dtype)
        return state

    def _sampled(self, name: str, layout: TensorLayout, plan: Mapping[str, Initializer], seed: int) -> torch.Tensor:
        form, dtype = self._stacks.form(name), str(layout.dtype).removeprefix("torch.")
        shape = form.weight_layout(layout).shape
        parts = [part.removeprefix(PARAMS) for part in self._stacks.names(name)]
        values = [torch.from_numpy(np.array(sample(plan[part], seed, part, shape, dtype))) for part in parts]
        return form.entry(values, torch.stack)

    def place_parameters(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        """Parameters of the state from whole tensors: this rank's shards."""
        names = [name for name in self._layouts if name.startswith(PARAMS)]
        whole = self._stacks.stacked({f"{PARAMS}{fqn}": weight for fqn, weight in weights.items()}, names, torch.stack)
        return {
            name: local_shard(
                weight.to(self._layouts[name].dtype), self._layouts[name], self._spec, self.process_index
            ).clone()
            for name, weight in whole.items()
        }

    def host_parameters(self, state: Mapping[str, torch.Tensor]) -> Tensors:
        """The parameters as whole tensors, by fully qualified name; every process must call it."""
        whole = {name: self._whole(name, tensor) for name, tensor in state.items() if name.startswith(PARAMS)}
        by_layer = self._stacks.unstacked(whole, lambda stack, turn: stack[turn])
        return {name.removeprefix(PARAMS): tensor for name, tensor in by_layer.items()}

    def abstract_state(self) -> dict[str, Any]:
        """What a checkpoint is restored onto: every process reads all of it and keeps its shards."""
        import jax

        from titan.graph.lowering.dtypes import array_dtype

        return {
            name: jax.ShapeDtypeStruct(layout.shape, array_dtype(layout.dtype))
            for name, layout in self._stacks.unstacked_layouts(self._layouts).items()
        }

    def to_arrays(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The whole state as JAX arrays; every process must call it."""
        import jax.numpy as jnp

        whole = {name: self._whole(name, tensor).numpy() for name, tensor in state.items()}
        return self._stacks.unstacked(
            {name: jnp.array(array) for name, array in whole.items()}, lambda stack, turn: stack[turn]
        )

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self._spec.axis_names:
            return tensor
        placements = self._layouts[name].placements
        return DTensor.from_local(tensor, self._mesh(), placements, run_check=False).full_tensor()

    def from_arrays(self, arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """This rank's shards of a restored state."""
        by_layer = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        whole = self._stacks.stacked(by_layer, list(self._layouts), torch.stack)
        return {
            name: local_shard(tensor, self._layouts[name], self._spec, self.process_index)
            for name, tensor in whole.items()
        }

    def read(self, metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """A step's metrics as numbers."""
        return {name: float(value) for name, value in metrics.items()}

    def fetch(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """What a step gives, tensors that every process has whole, as arrays."""
        return {name: value.numpy() for name, value in outputs.items()}

    def peak(self, config: MetricsConfig) -> Peak:
        """The peak that MFU is measured against: this machine's, divided among the processes that share it."""
        whole = resolve_peak(config)
        share = 1 if whole.source == "flag" else self.process_count
        return Peak(whole.flops_per_chip / share, self.process_count, whole.source)

    def agree(self, number: int) -> int:
        """The largest `number` of all processes once they have a process group; before that, the one given."""
        if self._device_mesh is None:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def agree_by_next(self, number: int) -> int:
        """The largest `number` of all processes, so that all stop at the same step."""
        return self.agree(number)

    def done_at(self) -> float:
        """Now: PyTorch on CPU has computed a step when its call returns."""
        return time.perf_counter()

    def close(self) -> None:
        """Leaves the process group."""
        if self._device_mesh is not None:
            dist.destroy_process_group()
            self._device_mesh = None


def _check_cpp_compiler() -> None:
    if not has_cpp_compiler():
        problem = "torch.compile finds no C++ compiler"
        raise ConfigError("compile.enable", problem, "install g++, or give --compile.enable=false")
