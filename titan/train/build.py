"""From a configuration to a run that can be trained: the one way through the system, in order."""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from titan.core.config.validate import ConfigError
from titan.core.init import Initializer, init_plan
from titan.graph.capture.spmd_check import check_spmd
from titan.graph.capture.trace import StepFunction, capture
from titan.graph.passes.common_subexpressions import common_subexpressions
from titan.graph.passes.dead_code import dead_code
from titan.graph.passes.memory_policy import memory_policy_pass
from titan.graph.passes.memory_rules import MemoryPolicyError, parse_memory_policy
from titan.graph.passes.no_ops import no_ops
from titan.graph.passes.pipeline import Pass, run_passes
from titan.models.family import BatchTensor
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec
from titan.train.config.compile import TpuConfig
from titan.train.config.run import Config
from titan.train.inputs.hf_weights import check_hf, read_hf
from titan.train.runtime.compiled_step import CompiledStep, Executable, Shapes
from titan.train.runtime.interface import CompileTarget, Runtime, State
from titan.train.sharding.mesh_axes import data_share, mesh_spec, sharding_policy
from titan.train.sharding.model_plan import model_split
from titan.train.step.builder import StepBuilder
from titan.train.step.expert_balance import ExpertBalance
from titan.train.step.state import (
    PER_PARAMETER,
    batch_layouts,
    eval_state_layouts,
    expert_bias_layouts,
    parameter_layouts,
    train_state_layouts,
)
from titan.train.step.stored_form import Stacks
from titan.train.swaps.rules import with_swaps
from titan.train.swaps.scan_layers import stacked_parameters, with_scanned_layers


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
    state = {**train_state_layouts(steps.parameters, mesh), **bias}
    runtime.prepare(mesh, state, stacks.in_state(PER_PARAMETER))
    seconds = dict.fromkeys(("capture", "spmd_check", "passes", "lower", "compile"), 0.0)
    compile_for = functools.partial(_compile, config=config, runtime=runtime, mesh=mesh, seconds=seconds)
    weights = {**eval_state_layouts(steps.parameters), **bias}
    run = Run(
        config=config,
        runtime=runtime,
        mesh=mesh,
        initial_state=functools.partial(_initial_state, config, runtime, plan),
        train_step=CompiledStep("train_step", functools.partial(compile_for, steps.train_step, state, steps.batch)),
        eval_step=CompiledStep("eval_step", functools.partial(compile_for, steps.eval_step, weights, steps.batch)),
        seconds=seconds,
    )
    if config.sampling is None or not config.sampling.interval:
        return run
    inputs = config.model.prediction_tensors(config.training.sequence_length)

    def predict_step(device_mesh: DeviceMesh | None) -> StepFunction:
        return steps.predict_step(device_mesh, inputs)

    compiled = CompiledStep("predict_step", functools.partial(compile_for, predict_step, weights, inputs))
    return dataclasses.replace(run, predict_step=compiled, prediction_tensors=inputs)


def step_builder(config: Config, tree: Any) -> tuple[StepBuilder, Stacks]:
    """What builds the steps of a run, and which of its parameters are stacks.

    Args:
      config: resolved.
      tree: the model's component tree after all swaps, its layers not yet in loops (see `components`).
    """
    policy = sharding_policy(config.parallelism)
    build_model = with_loops(tree, config.tpu_config).build
    model = build_model()
    split = model_split(config, model)
    segments = {name: plan.segments for name, plan in split.plans.items() if plan.segments is not None}
    stacks = Stacks(stacked_parameters(model), segments)
    steps = StepBuilder(
        build_model=build_model,
        batch=config.model.batch_tensors(config.training.sequence_length),
        loss_module=config.model.loss_module,
        parameters=parameter_layouts(model, mesh_spec(config.parallelism), policy, stacks, split.plans),
        policy=policy,
        optimizer=config.optimizer,
        max_grad_norm=config.training.max_grad_norm,
        num_microbatches=config.training.microbatches,
        plans=split.plans,
        borders=split.borders,
        balance=expert_balance(config),
    )
    return steps, stacks


def components(config: Config) -> Any:
    """The model's component tree, in which the swaps that the configuration asks for are made."""
    return with_swaps(config.model.components(), config)


def expert_balance(config: Config) -> ExpertBalance | None:
    """How the model's experts are balanced; None if it has none."""
    model = config.model
    if not hasattr(model, "num_experts"):
        return None
    return ExpertBalance(model.num_mixtures, model.num_experts, model.num_active_experts, config.expert_balance)


def with_loops(tree: Any, tpu_config: TpuConfig) -> Any:
    """The component tree with its layers as loops, if the configuration asks for them or for programs by layer."""
    if tpu_config.use_graph_split:
        return with_scanned_layers(tree, longest_pattern=1)
    return with_scanned_layers(tree) if tpu_config.use_scan_layers else tree


def graph_passes(config: Config) -> tuple[Pass, ...]:
    """The passes of every executor, in order."""
    policy = memory_policy_pass(
        parse_memory_policy(config.compile.memory_policy),
        reshard=config.parallelism.reshard_after_forward,
        # Between the programs of a split step values are moved by the executor, a turn ahead.
        prefetch=0 if config.tpu_config.use_graph_split else config.compile.offload_prefetch,
    )
    return no_ops, common_subexpressions, dead_code, policy


def _initial_state(config: Config, runtime: Runtime, plan: dict[str, Initializer]) -> State:
    state = runtime.initial_state(plan, config.training.seed)
    if config.checkpoint.load_hf:
        return {**state, **runtime.place_parameters(read_hf(config))}
    return state


def _compile(
    make_step: Callable[[DeviceMesh | None], StepFunction],
    state: dict[str, TensorLayout],
    tensors: Sequence[BatchTensor],
    shapes: Shapes,
    *,
    config: Config,
    runtime: CompileTarget,
    mesh: MeshSpec,
    seconds: dict[str, float],
) -> Executable:
    batch = batch_layouts(
        tensors, _global(shapes, data_share(mesh, runtime.device_processes, runtime.device_processes[0])[1]), mesh
    )
    if not config.tpu_config.use_graph_trainer:
        return runtime.uncaptured(make_step, batch)
    start = time.perf_counter()
    graph = capture(make_step, state, batch, mesh)
    captured_at = time.perf_counter()
    if mesh.num_devices > 1:
        check_spmd(graph, capture(make_step, state, batch, mesh, rank=mesh.num_devices - 1))
    checked_at = time.perf_counter()
    dump_folder = (
        pathlib.Path(config.tpu_config.dump_graph, make_step.__name__) if config.tpu_config.dump_graph else None
    )
    passes = (*graph_passes(config), *runtime.passes)
    disabled = {step.__name__ for step in passes}.intersection(config.tpu_config.disable_passes)
    try:
        graph, _ = run_passes(graph, passes, disabled=sorted(disabled), dump_folder=dump_folder)
    except MemoryPolicyError as error:
        raise ConfigError("compile.memory_policy", str(error), "correct the rule") from None
    seconds["capture"] += captured_at - start
    seconds["spmd_check"] += checked_at - captured_at
    seconds["passes"] += time.perf_counter() - checked_at
    return runtime.compile(graph, seconds)


def _global(shapes: Shapes, data_count: int) -> Shapes:
    return {name: (shape[0], shape[1] * data_count, *shape[2:]) if shape else shape for name, shape in shapes.items()}
