"""Steps of small models, compiled and run: three training steps on one batch, or an evaluation."""

import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from titan.core.init import Initializer, Normal, Ones, TruncatedNormal, Uniform, Zeros, init_plan
from titan.graph.executors.torch import TorchExecutable
from titan.graph.executors.xla import XlaExecutable, abstract_arrays, jax_mesh, lower_xla
from titan.graph.split.executable import SplitExecutable, compile_split
from titan.graph.testing.xla_cpu import FAST_COMPILE, use_cpu_devices
from titan.train.step.state import EXPERT_BIAS, PARAMS, per_parameter
from titan.train.testing.batches import batch_of
from titan.train.testing.case import Case
from titan.train.testing.graphs import builder_of, graph_of
from titan.train.testing.models import model_components
from titan.train.testing.outcome import Outcome

NUM_STEPS = 3
use_cpu_devices(8)


@functools.cache
def initial_parameters(model: str) -> dict[str, np.ndarray]:
    """Parameters by name, layer by layer, float32: drawn by numpy, since JAX would compile a program for each shape."""
    built = model_components(model).build()
    plan = init_plan(built)
    if model.startswith("flux"):  # with modulations and head of 0 no block would do anything, nor have gradients
        plan = {name: Normal(0.1) if init == Zeros() else init for name, init in plan.items()}
    if model.startswith("muse_glimmer"):  # its last norm begins at 0, which would leave all else without gradients
        plan = dict.fromkeys(plan, Normal(0.1))
    random = np.random.default_rng(0)
    return {name: _drawn(plan[name], tuple(weight.shape), random) for name, weight in built.named_parameters()}


def _drawn(initializer: Initializer, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    match initializer:
        case Zeros() | Ones():
            return np.full(shape, float(initializer == Ones()), np.float32)
        case Uniform(bound):
            return random.uniform(-bound, bound, shape).astype(np.float32)
        case Normal(std) | TruncatedNormal(std):
            return random.normal(0, std, shape).astype(np.float32)
    raise TypeError(f"{initializer!r} is no Initializer")


def initial_state(
    case: Case, layouts: Mapping[str, Any], given: Mapping[str, np.ndarray] = types.MappingProxyType({})
) -> dict[str, np.ndarray]:
    """The state before the first step, of these layouts; parameters, but for what is given by name, layer by layer."""
    steps, stacks = builder_of(case)
    by_layer = {**{f"{PARAMS}{name}": array for name, array in initial_parameters(case.model).items()}, **given}
    state = {name: np.zeros(layout.shape, str(layout.dtype).removeprefix("torch.")) for name, layout in layouts.items()}
    names = [name for name in layouts if name.startswith(PARAMS) or name in given]
    return {**state, **stacks.in_state(per_parameter(steps.optimizer)).stacked(by_layer, names, np.stack)}


@functools.cache
def compiled(case: Case, *, evaluate: bool = False) -> XlaExecutable | SplitExecutable:
    """The step as an XLA program, or as several."""
    graph = graph_of(case, evaluate=evaluate)
    if case.split:
        return compile_split(graph, jax.devices(), compiler_options=FAST_COMPILE)
    return lower_xla(graph, jax.devices(), compiler_options=FAST_COMPILE).compile()


@functools.cache
def run_xla(case: Case) -> Outcome:
    """Three training steps on one batch."""
    executable = compiled(case)
    graph = executable.graph
    abstract = abstract_arrays(graph.state, case.mesh, jax_mesh(case.mesh, jax.devices()))
    initial = initial_state(case, graph.state)
    return _run(
        case,
        executable,
        {name: jax.device_put(array, abstract[name].sharding) for name, array in initial.items()},
        executable.place(batch_of(case)),
    )


@functools.cache
def run_torch(case: Case) -> Outcome:
    """The same by the torch executor, on one device."""
    graph = graph_of(case)
    initial = initial_state(case, graph.state)
    return _run(
        case,
        TorchExecutable(graph, lambda: None),
        {name: torch.from_numpy(np.array(array)) for name, array in initial.items()},
        {name: torch.from_numpy(np.array(array)) for name, array in batch_of(case).items()},
    )


def _run(case: Case, executable: Any, state: dict[str, Any], arrays: dict[str, Any]) -> Outcome:
    metrics, moments = [], {}
    for _ in range(NUM_STEPS):
        state, values = executable(state, arrays)
        metrics.append({name: float(value) for name, value in values.items()})
        moments = moments or _by_layer(case, state, "exp_avg/")
    bias = _by_layer(case, state, EXPERT_BIAS).get("")
    return Outcome(metrics, moments, _by_layer(case, state, PARAMS), bias)


def _by_layer(case: Case, state: Mapping[str, Any], kind: str) -> dict[str, np.ndarray]:
    _, stacks = builder_of(case)
    kept = {name: value for name, value in state.items() if name.startswith(kind)}
    arrays = {n: np.array(v.numpy() if isinstance(v, torch.Tensor) else v) for n, v in kept.items()}
    by_layer = stacks.in_state((kind,)).unstacked(arrays, lambda stack, turn: stack[turn])
    return {name.removeprefix(kind): array for name, array in by_layer.items()}


def evaluate_xla(case: Case, given: Mapping[str, np.ndarray] = types.MappingProxyType({})) -> dict[str, float]:
    """The metrics of the evaluation step, at the initial state but for what is given by name, layer by layer."""
    executable = compiled(case, evaluate=True)
    graph = executable.graph
    abstract = abstract_arrays(graph.state, case.mesh, jax_mesh(case.mesh, jax.devices()))
    initial = initial_state(case, graph.state, given)
    state = {name: jax.device_put(array, abstract[name].sharding) for name, array in initial.items()}
    return {name: float(v) for name, v in executable(state, executable.place(batch_of(case)))[1].items()}
