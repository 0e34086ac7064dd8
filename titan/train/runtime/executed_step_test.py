"""The training step as PyTorch and XLA execute it: skipped updates, and batches of another shape."""

import functools
import logging
from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch

from titan.graph.capture.trace import capture
from titan.graph.executors.xla import XlaExecutable, lower_xla
from titan.models.llama3.config import Llama3Config
from titan.parallel.mesh import MeshSpec
from titan.parallel.simple_fsdp import ShardingPolicy
from titan.train.config.run import Config
from titan.train.optimizers.registry import make_optimizer
from titan.train.runtime.compiled_step import CompiledStep, Shapes
from titan.train.step.builder import StepBuilder
from titan.train.step.state import (
    LEARNING_RATE,
    SKIPPED_STEPS,
    STEP,
    batch_layouts,
    parameter_layouts,
    train_state_layouts,
)

ONE_DEVICE = MeshSpec((), ())
POLICY = ShardingPolicy(gather_dtype=None, reduce_dtype=torch.float32)
MODEL = Llama3Config(vocab_size=64, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=32)

Arrays = dict[str, np.ndarray]
Step = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]


def _batch(repeats: int = 1) -> Arrays:
    tokens = np.tile(np.random.default_rng(0).integers(0, 64, (1, 2, 9), dtype=np.int32), (1, repeats, 1))
    num_rows = tokens.shape[1]
    return {
        "tokens": tokens[..., :-1],
        "labels": tokens[..., 1:],
        "positions": np.broadcast_to(np.arange(8, dtype=np.int32), (1, num_rows, 8)),
        "segment_ids": np.ones((1, num_rows, 8), np.int32),
        LEARNING_RATE: np.float32(1e-2),
    }


def _builder() -> StepBuilder:
    build_model = MODEL.components().build
    parameters = parameter_layouts(build_model(), ONE_DEVICE, POLICY)
    return StepBuilder(
        build_model=build_model,
        batch=MODEL.batch_tensors(8),
        loss_module=MODEL.loss_module,
        parameters=parameters,
        policy=POLICY,
        optimizer=make_optimizer(Config()),
        max_grad_norm=1.0,
        num_microbatches=1,
    )


def _state(builder: StepBuilder) -> Arrays:
    draw = np.random.default_rng(1)
    layouts = train_state_layouts(builder.parameters, builder.optimizer, ONE_DEVICE)
    state = {name: 0.1 * draw.random(layout.shape, np.float32) for name, layout in layouts.items()}
    return {**state, STEP: np.int32(3), SKIPPED_STEPS: np.int32(0)}


def _eager(builder: StepBuilder) -> Step:
    step = builder.train_step(None)

    def call(state: Arrays, batch: Arrays) -> tuple[Arrays, Arrays]:
        tensors = [
            {name: torch.from_numpy(np.array(array)) for name, array in group.items()} for group in (state, batch)
        ]
        return tuple({name: value.numpy() for name, value in group.items()} for group in step.call(*tensors))

    return call


def _xla(builder: StepBuilder) -> Step:
    return _compiled(CompiledStep("train_step", functools.partial(_compile, builder)))


def _compile(builder: StepBuilder, shapes: Shapes) -> XlaExecutable:
    layouts = (
        train_state_layouts(builder.parameters, builder.optimizer, ONE_DEVICE),
        batch_layouts(builder.batch, shapes, ONE_DEVICE),
    )
    return lower_xla(capture(builder.train_step, *layouts, ONE_DEVICE), jax.devices()[:1]).compile()


def _compiled(step: CompiledStep) -> Step:
    def call(state: Arrays, batch: Arrays) -> tuple[Arrays, Arrays]:
        executable = step.executable_for(batch)
        results = executable(jax.device_put(state, jax.devices()[0]), executable.place(batch))
        return tuple({name: np.asarray(value) for name, value in group.items()} for group in results)

    return call


@pytest.mark.parametrize("make", [_eager, _xla], ids=["eager", "xla"])
def test_an_update_with_a_gradient_that_is_not_finite_is_skipped(make):
    builder = _builder()
    step, good = make(builder), _state(builder)
    bad = {name: array.copy() for name, array in good.items()}
    bad["params/head.weight"][5] = 3e38  # finite itself; the logits overflow
    for number in (1, 2):
        new, metrics = step(bad, _batch())
        assert not np.isfinite(metrics["grad_norm"])
        assert metrics[SKIPPED_STEPS] == number
        assert new.pop(SKIPPED_STEPS) == number
        assert [name for name in new if new[name].tobytes() != bad[name].tobytes()] == []
        bad = {**new, SKIPPED_STEPS: np.int32(number)}

    new, metrics = step({**good, SKIPPED_STEPS: np.int32(2)}, _batch())
    assert np.isfinite(metrics["grad_norm"])
    assert (new[STEP], new[SKIPPED_STEPS], metrics[SKIPPED_STEPS]) == (4, 2, 2)
    assert [name for name in new if new[name].tobytes() == good[name].tobytes()] == []


def test_eager_and_xla_make_the_same_update():
    builder = _builder()
    results = [make(builder)(_state(builder), _batch()) for make in (_eager, _xla)]
    for one, other in zip(*results, strict=True):
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_batch_of_another_shape_is_one_recompile(caplog):
    builder = _builder()
    step = CompiledStep("train_step", functools.partial(_compile, builder))
    call = _compiled(step)
    with caplog.at_level(logging.WARNING, logger="titan"):
        once, twice, again = [call(_state(builder), _batch(repeats))[1] for repeats in (1, 2, 1)]
    assert step.recompiles == 1
    assert [message for message in caplog.messages if "recompiling" in message] == [
        "recompiling train_step (1): "
        + ", ".join(f"{name} (1, 2, 8) -> (1, 4, 8)" for name in ("labels", "positions", "segment_ids", "tokens"))
    ]
    # The mean loss of the rows does not change when each comes twice.
    assert twice["num_tokens"] == 2 * once["num_tokens"]
    for name in ("loss", "grad_norm"):
        assert twice[name] == pytest.approx(once[name], rel=1e-5)
        assert again[name] == once[name]
