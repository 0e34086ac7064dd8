"""A run with a kernel swapped in has the losses of the run without it over a few steps, float32, on two devices."""

import dataclasses
import functools

import numpy as np
import pytest

from titan.core.config.flags import parse
from titan.core.config.validate import ConfigError
from titan.graph.testing.xla_cpu import compile_quickly
from titan.models.qwen3.config import Qwen3MoeConfig
from titan.train.assembly import components
from titan.train.build import build
from titan.train.config.run import Config
from titan.train.runtime.xla import XlaRuntime
from titan.train.step.state import LEARNING_RATE

NUM_STEPS = 6
# Odd sizes: no block divides the sequence, and no tile the vocabulary.
FLAGS = (
    "--model.num_layers=1",
    "--model.dim=32",
    "--model.num_heads=4",
    "--model.num_kv_heads=2",
    "--model.vocab_size=300",
    "--tokenizer.vocab_size=300",
    "--training.sequence_length=150",
    "--training.batch_size=4",
    "--parallelism.num_devices=2",
    "--compile.cache_folder=",
)
SPLASH = "--splash_attention_kernel.enable"
FUSED_LOSS = "--fused_linear_cross_entropy.enable"
GROUPED = "--grouped_matmul.enable"
ROPE = "--rope_kernel.enable"
MOE = "a model with experts"
PAIRED = "--grouped_matmul.paired"


@functools.cache
def _runtime() -> XlaRuntime:
    compile_quickly()
    return XlaRuntime(_config())


def _config(*flags: str) -> Config:
    recipe = Config(model=Qwen3MoeConfig(head_dim=16)) if {GROUPED, PAIRED, MOE} & {*flags} else Config()
    return parse(["test", *FLAGS, *(flag for flag in flags if flag != MOE)], recipe)


def _batches() -> list[dict[str, np.ndarray]]:
    """Packed documents, padding at the end of each row, and labels that do not count."""
    draw = np.random.default_rng(0)
    shape = (1, 4, 150)
    batches = []
    for _ in range(NUM_STEPS):
        segment_ids = np.sort(draw.integers(1, 5, shape, dtype=np.int32))
        segment_ids[..., 140:] = 0
        labels = draw.integers(0, 300, shape, dtype=np.int32)
        labels[(segment_ids == 0) | (draw.random(shape) < 0.1)] = -100
        batches.append(
            {
                "tokens": draw.integers(0, 300, shape, dtype=np.int32),
                "labels": labels,
                "positions": np.broadcast_to(np.arange(150, dtype=np.int32), shape).copy(),
                "segment_ids": segment_ids,
            }
        )
    return batches


@functools.cache
def _losses(*flags: str) -> tuple[tuple[float, ...], frozenset[str]]:
    """The losses of a run, and the kernels in its graph."""
    # A router's choice among equals may fall either way by rounding, and at a high rate that soon shows in the loss.
    rate = np.float32(1e-3 if {GROUPED, PAIRED, MOE} & {*flags} else 1e-2)
    run = build(_config(*flags), _runtime())
    state, losses = run.initial_state(), []
    for batch in ({**batch, LEARNING_RATE: rate} for batch in _batches()):
        executable = run.train_step.executable_for(batch)
        state, metrics = executable(state, executable.place(batch))
        losses.append(float(metrics["loss"]))
    targets = (str(node.target) for node in executable.graph.module.graph.nodes if node.op == "call_function")
    names = {target.split(".")[1] for target in targets if target.startswith("titan.")}
    return tuple(losses), frozenset(names - {"barrier"})  # the memory policy's, and no kernel


@pytest.mark.parametrize(
    ("flags", "kernels"),
    [
        pytest.param((SPLASH,), {"splash_attention", "splash_attention_backward"}, marks=pytest.mark.exhaustive),
        pytest.param(
            (FUSED_LOSS,),
            {"linear_cross_entropy_statistics", "linear_cross_entropy_statistics_backward"},
            marks=pytest.mark.exhaustive,
        ),
        ((FUSED_LOSS, "--fused_linear_cross_entropy.gradients=forward"), {"linear_cross_entropy_with_gradients"}),
        (
            (SPLASH, FUSED_LOSS, ROPE, "--model.tie_embeddings", "--fused_linear_cross_entropy.vocab_tile=128"),
            {
                "rotate_heads",
                "rotate_heads_backward",
                "splash_attention",
                "splash_attention_backward",
                "linear_cross_entropy_statistics",
                "linear_cross_entropy_statistics_backward",
            },
        ),
        ((GROUPED,), {"grouped_matmul", "grouped_matmul_backward", "apply_route_scores"}),
        ((GROUPED, PAIRED), {"paired_grouped_matmul", "paired_grouped_matmul_backward", "apply_route_scores_backward"}),
    ],
    ids=["splash", "fused_loss", "fused_loss_forward", "all_tied", "grouped", "paired"],
)
def test_losses_are_those_without_the_kernel(flags, kernels):
    base = (MOE,) if {GROUPED, PAIRED} & {*flags} else tuple(flag for flag in flags if flag.startswith("--model"))
    expected, none = _losses(*base)
    losses, found = _losses(*flags)
    assert none == frozenset()
    assert found and kernels <= found
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_kernel_takes_nothing_but_its_own_nodes():
    before, after = components(_config()), components(_config(SPLASH))
    for old, new in zip(before.layers, after.layers, strict=True):
        assert dataclasses.replace(new, attention=dataclasses.replace(new.attention, inner=old.attention.inner)) == old
    assert dataclasses.replace(after, layers=before.layers) == before
    assert dataclasses.replace(components(_config(FUSED_LOSS)), loss=before.loss) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((SPLASH, "--splash_attention_kernel.sa_block_q=100"), "splash_attention_kernel.*sa_block_q.*100.*128"),
        ((FUSED_LOSS, "--fused_linear_cross_entropy.vocab_tile=100"), "fused_linear_cross_entropy.*vocab_tile.*128"),
        ((SPLASH, "--splash_attention_kernel.sa_dq_reduction_steps=3"), "only the tokamax kernel has it.*=tokamax"),
        (
            (SPLASH, "--splash_attention_kernel.sa_dq_reduction_steps=2")
            + ("--splash_attention_kernel.implementation=tokamax",),
            "sa_dq_reduction_steps=2: the kernel knows 0 and 3 only",
        ),
        (
            (SPLASH, "--splash_attention_kernel.sa_use_fused_bwd_kernel")
            + ("--splash_attention_kernel.implementation=tokamax",),
            "sa_use_fused_bwd_kernel: the backward of the tokamax kernel is always fused",
        ),
        ((FUSED_LOSS, "--fused_linear_cross_entropy.token_tile=256"), "token_tile: with gradients=backward nothing"),
        (
            (FUSED_LOSS, "--fused_linear_cross_entropy.gradients=forward")
            + ("--fused_linear_cross_entropy.vocab_tile=256",),
            "vocab_tile: with gradients=forward nothing",
        ),
        (("--fused_linear_cross_entropy.z_loss=0.1",), "only the fused loss has a z-loss.*enable"),
        (
            (FUSED_LOSS, "--fused_linear_cross_entropy.gradients=forward")
            + ("--fused_linear_cross_entropy.implementation=mosaic",),
            "mosaic computes gradients in the backward pass only",
        ),
        (("--grouped_matmul",), "grouped_matmul.enable: Llama3 has no experts; .*qwen3_moe_debug"),
        ((PAIRED,), "grouped_matmul.paired: grouped_matmul.enable is off"),
        ((SPLASH, "--splash_attention_kernel.implementation=cuda"), "splash_attention_kernel.implementation"),
    ],
)
def test_a_wrong_flag_is_one_line_before_anything_is_built(flags, message):
    with pytest.raises(ConfigError, match=message) as error:
        _config(*flags)
    assert "\n" not in str(error.value)
