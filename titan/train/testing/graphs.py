"""Captured steps of small models, before and after their passes; each is captured once in a process."""

import dataclasses
import functools

import numpy as np

from titan.graph.capture.spmd_check import check_spmd
from titan.graph.capture.trace import capture
from titan.graph.ir.step_graph import StepGraph
from titan.graph.passes.pipeline import run_passes
from titan.graph.passes.registry import passes_for
from titan.train.assembly import components, step_builder
from titan.train.build import pass_options
from titan.train.step.builder import StepBuilder
from titan.train.step.state import (
    LEARNING_RATE,
    batch_layouts,
    eval_state_layouts,
    expert_bias_layouts,
    train_state_layouts,
)
from titan.train.step.stored_form import Stacks
from titan.train.testing.batches import batch_of
from titan.train.testing.case import Case
from titan.train.testing.models import model_components


@functools.cache
def builder_of(case: Case) -> tuple[StepBuilder, Stacks]:
    """What makes the steps of a case, and which of its parameters are stacks."""
    config = case.config
    tree = model_components(case.model) if case.model == "pattern" else components(config)
    return step_builder(config, tree)


def captured(case: Case, *, evaluate: bool = False) -> StepGraph:
    """The step before its passes, as the first device has it."""
    return _captured(case, evaluate, 0)


def assert_one_program(case: Case, *, evaluate: bool = False) -> None:
    """Holds that the last device has the program of the first, but for the numbers of their positions."""
    check_spmd(captured(case, evaluate=evaluate), _captured(case, evaluate, case.mesh.num_devices - 1))


@functools.cache
def _captured(case: Case, evaluate: bool, rank: int) -> StepGraph:
    steps, _ = builder_of(case)
    step = steps.eval_step if evaluate else steps.train_step
    shapes = {
        name: np.shape(array) for name, array in batch_of(case).items() if not (evaluate and name == LEARNING_RATE)
    }
    state = (
        eval_state_layouts(steps.parameters)
        if evaluate
        else train_state_layouts(steps.parameters, steps.optimizer, case.mesh)
    )
    state |= expert_bias_layouts(steps.balance.bias_shape if steps.balance else None, case.mesh)
    return capture(step, state, batch_layouts(steps.batch, shapes, case.mesh), case.mesh, rank=rank)


def graph_of(case: Case, *, evaluate: bool = False) -> StepGraph:
    """The step after the passes that the flags of `case` mean."""
    return _graph_of(case, evaluate)


@functools.cache
def _graph_of(case: Case, evaluate: bool) -> StepGraph:
    # All cases that the policy alone tells apart share a capture.
    before = dataclasses.replace(case, memory_policy="none", prefetch=1, reshard=True)
    return run_passes(captured(before, evaluate=evaluate), passes_for("torch", pass_options(case.config)))[0]
