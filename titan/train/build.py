"""From a configuration to a run that can be trained: the one way through the system, in order.

A step is captured as one graph (`capture_step`), passes turn it into another graph that computes the same
(`run_step_passes`), and the executor makes a program of it (`runtime.compile`), when the first batch comes.
"""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

from torch.distributed.device_mesh import DeviceMesh

from titan.core.config.validate import ConfigError
from titan.core.init import init_plan
from titan.core.progress import progress
from titan.graph.capture.spmd_check import check_spmd
from titan.graph.capture.trace import StepFunction, capture
from titan.graph.ir.step_graph import StepGraph
from titan.graph.passes.memory_rules import MemoryPolicyError
from titan.graph.passes.options import PassOptions
from titan.graph.passes.pipeline import run_passes
from titan.graph.passes.registry import passes_for
from titan.models.family import BatchTensor
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec
from titan.train.assembly import components, step_builder
from titan.train.config.run import Config
from titan.train.inputs.hf_weights import check_hf, read_hf
from titan.train.runtime.compiled_step import CompiledStep, Executable, Shapes
from titan.train.runtime.interface import CompileTarget, Runtime, State
from titan.train.runtime.run import Run
from titan.train.sharding.mesh_axes import data_share, mesh_spec
from titan.train.step.state import (
    batch_layouts,
    eval_state_layouts,
    expert_bias_layouts,
    per_parameter,
    train_state_layouts,
)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step that can be captured.

    Attributes:
      name: what logs and dumps call it.
      make: the step as a function of one rank's tensors, for a device mesh.
      state: the layouts of the state that it takes, by name.
      tensors: those of the model's tensors that a batch of it has.
    """

    name: str
    make: Callable[[DeviceMesh | None], StepFunction]
    state: dict[str, TensorLayout]
    tensors: Sequence[BatchTensor]


def build(config: Config, runtime: Runtime | CompileTarget) -> Run:
    """Puts a run together; nothing is compiled or allocated yet.

    Args:
      config: a validated configuration.
      runtime: the devices of the executor that the configuration names; of a mere CompileTarget the steps can be
        compiled, and there is no initial state to call them with.

    Raises:
      ConfigError: the configuration does not suit the devices present.
    """
    config = config.resolve_devices(runtime.num_devices)
    check_hf(config)
    mesh = mesh_spec(config.parallelism)
    tree = components(config)
    plan = init_plan(tree.build())
    steps, stacks = step_builder(config, tree)
    bias = expert_bias_layouts(steps.balance.bias_shape if steps.balance else None, mesh)
    state = {**train_state_layouts(steps.parameters, steps.optimizer, mesh), **bias}
    weights = {**eval_state_layouts(steps.parameters), **bias}
    runtime.prepare(mesh, state, stacks.in_state(per_parameter(steps.optimizer)))
    seconds = dict.fromkeys(("capture", "spmd_check", "passes", "lower", "compile"), 0.0)

    def initial_state() -> State:
        state = runtime.initial_state(plan, config.training.seed)
        return {**state, **runtime.place_parameters(read_hf(config))} if config.checkpoint.load_hf else state

    def compiled(step: StepPlan) -> CompiledStep:
        return CompiledStep(step.name, functools.partial(compile_step, step, config, runtime, mesh, seconds))

    run = Run(
        config=config,
        runtime=runtime,
        mesh=mesh,
        initial_state=initial_state,
        train_step=compiled(StepPlan("train_step", steps.train_step, state, steps.batch)),
        eval_step=compiled(StepPlan("eval_step", steps.eval_step, weights, steps.batch)),
        seconds=seconds,
    )
    if config.sampling is None or not config.sampling.interval:
        return run
    inputs = config.model.prediction_tensors(config.training.sequence_length)
    predict_step = StepPlan("predict_step", functools.partial(steps.predict_step, inputs=inputs), weights, inputs)
    return dataclasses.replace(run, predict_step=compiled(predict_step), prediction_tensors=inputs)


def compile_step(
    step: StepPlan,
    config: Config,
    runtime: CompileTarget,
    mesh: MeshSpec,
    seconds: dict[str, float],
    shapes: Shapes,
) -> Executable:
    """The step as the executor runs it on batches of these shapes (of this process's part); adds to `seconds`."""
    _, num_shares = data_share(mesh, runtime.device_processes, runtime.device_processes[0])
    whole = {name: (shape[0], shape[1] * num_shares, *shape[2:]) if shape else shape for name, shape in shapes.items()}
    batch = batch_layouts(step.tensors, whole, mesh)
    if not config.tpu_config.use_graph_trainer:
        return runtime.uncaptured(step.make, batch)
    with progress(f"capturing {step.name}"):
        graph = capture_step(step, batch, mesh, seconds)
        with _timed(seconds, "passes"):
            graph = run_step_passes(graph, step.name, config, runtime.executor)
    if config.tpu_config.use_graph_split:
        return runtime.compile(graph, seconds)  # which counts the pieces
    with progress(f"compiling {step.name}"):
        return runtime.compile(graph, seconds)


def capture_step(
    step: StepPlan, batch: dict[str, TensorLayout], mesh: MeshSpec, seconds: dict[str, float]
) -> StepGraph:
    """The step as the first device has it, held to be the program of the last one as well."""
    with _timed(seconds, "capture"):
        graph = capture(step.make, step.state, batch, mesh)
    if mesh.num_devices > 1:
        with _timed(seconds, "spmd_check"):
            check_spmd(graph, capture(step.make, step.state, batch, mesh, rank=mesh.num_devices - 1))
    return graph


def run_step_passes(graph: StepGraph, name: str, config: Config, executor: str) -> StepGraph:
    """The graph after the passes of the executor that `--tpu_config.disable_passes` leaves on.

    Raises:
      ConfigError: a rule of `--compile.memory_policy` does not suit the model.
    """
    passes = passes_for(executor, pass_options(config))
    disabled = sorted({step.__name__ for step in passes}.intersection(config.tpu_config.disable_passes))
    folder = pathlib.Path(config.tpu_config.dump_graph, name) if config.tpu_config.dump_graph else None
    try:
        return run_passes(graph, passes, disabled=disabled, dump_folder=folder)[0]
    except MemoryPolicyError as error:
        raise ConfigError("compile.memory_policy", str(error), "correct the rule") from None


def pass_options(config: Config) -> PassOptions:
    """What of a run's configuration passes depend on."""
    return PassOptions(
        memory_policy=config.compile.memory_policy,
        reshard_after_forward=config.parallelism.reshard_after_forward,
        # Between the programs of a split step values are moved by the executor, an iteration ahead.
        offload_prefetch=0 if config.tpu_config.use_graph_split else config.compile.offload_prefetch,
        config=config,
    )


@contextlib.contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] += time.perf_counter() - start
