"""What the trainer asks of an executor's devices: the interface of `XlaRuntime`, `TorchRuntime` and `AotRuntime`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from titan.core.init import Initializer
from titan.core.metrics import MetricsConfig, Peak
from titan.graph.capture.trace import StepFunction
from titan.graph.ir.step_graph import StepGraph
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec
from titan.train.runtime.compiled_step import Executable
from titan.train.step.stored_form import Stacks

State = Mapping[str, Any]
"""A run's state as its executor holds it, by the names of `titan.train.step.state`: jax.Arrays, or a rank's tensors."""


class CompileTarget(Protocol):
    """The devices that steps are compiled for. `prepare` comes before all other calls.

    Attributes:
      num_devices: devices of all processes together.
      device_processes: the process of each device of the mesh, in the mesh's order, once `prepare` was called.
      device_kind: what the run is reported to run on.
      executor: its name, by which passes are chosen.
    """

    num_devices: int
    device_processes: Sequence[int]
    device_kind: str
    executor: str

    def prepare(self, spec: MeshSpec, layouts: Mapping[str, TensorLayout], stacks: Stacks) -> None:
        """Fixes the mesh of everything that follows, the layout of each entry of the state, and which are stacked."""

    def compile(self, graph: StepGraph, seconds: dict[str, float]) -> Executable:
        """Makes a captured step executable; adds the time that it took to the stages `lower` and `compile`."""

    def uncaptured(
        self, make_step: Callable[[DeviceMesh | None], StepFunction], batch: Mapping[str, TensorLayout]
    ) -> Executable:
        """The step without capture, for such batches. NotImplementedError where the executor runs graphs alone."""


class Runtime(CompileTarget, Protocol):
    """The devices of one executor, and this process's part in a run on them.

    Attributes:
      process_index: this process among those of the run.
      saves: whether this process takes part in writing checkpoints.
      captures_late: whether a step can still be captured once another has run.
    """

    process_index: int
    saves: bool
    captures_late: bool

    def initial_state(self, plan: Mapping[str, Initializer], seed: int) -> State:
        """Parameters by their initialisers and everything else zero, each device or process with its shards."""

    def place_parameters(self, weights: Mapping[str, torch.Tensor]) -> State:
        """The parameters of the state from whole tensors on the host, by fully qualified name."""

    def host_parameters(self, state: State) -> dict[str, torch.Tensor]:
        """The parameters as whole tensors on the host of process 0, by fully qualified name.

        Every process must call it; those other than process 0 may be given none.
        """

    def abstract_state(self) -> dict[str, Any]:
        """What a checkpoint is restored onto: a jax.ShapeDtypeStruct by name, layer by layer."""

    def to_arrays(self, state: State) -> dict[str, Any]:
        """The state as the checkpoint stores it, in jax.Arrays, layer by layer; every process must call it."""

    def from_arrays(self, arrays: Mapping[str, Any]) -> State:
        """The state from what a checkpoint gave."""

    def read(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Waits for a step's metrics and brings them to the host."""

    def fetch(self, outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Waits for what a step gives, tensors that every device has whole, and brings them to the host."""

    def peak(self, config: MetricsConfig) -> Peak:
        """The peak that MFU is measured against."""

    def agree(self, number: int) -> int:
        """The largest `number` of all processes; every process must call it, and waits for the others."""

    def agree_by_next(self, number: int) -> int:
        """The largest `number` of all processes, so that all stop at the same step; every process must call it.

        It does not wait for the step that was just dispatched: of several processes it may give what they came with at
        the call before, 0 at the first.
        """

    def done_at(self) -> float | None:
        """When the step just called was computed (`time.perf_counter()`); None where it is still being computed."""

    def close(self) -> None:
        """Ends what `prepare` and the first step began, once all processes have come here."""
