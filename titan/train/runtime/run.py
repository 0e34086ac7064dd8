"""A run as it is built: its devices, and its steps, which are compiled when the first batch comes."""

import dataclasses
from collections.abc import Callable, Sequence

from titan.models.family import BatchTensor
from titan.parallel.mesh import MeshSpec
from titan.train.config.run import Config
from titan.train.runtime.compiled_step import CompiledStep
from titan.train.runtime.interface import Runtime, State


@dataclasses.dataclass
class Run:
    """A run, built and not yet started.

    Attributes:
      config: resolved for the devices present.
      runtime: the executor's devices.
      mesh: the device mesh without trivial axes.
      initial_state: makes the state that a new run begins from.
      train_step, eval_step: compiled when the first batch comes.
      predict_step: the model alone, for a run that samples, else None.
      prediction_tensors: what it takes.
      seconds: time spent in each stage so far (capture, spmd_check, which captures once more, passes, lower, compile).
    """

    config: Config
    runtime: Runtime
    mesh: MeshSpec
    initial_state: Callable[[], State]
    train_step: CompiledStep
    eval_step: CompiledStep
    seconds: dict[str, float]
    predict_step: CompiledStep | None = None
    prediction_tensors: Sequence[BatchTensor] = ()
