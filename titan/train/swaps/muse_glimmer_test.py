"""Muse Glimmer with kernels, loops and memory policies follows the plain run, whose attention is PyTorch's with a mask.

What windows, NoPE, gate and soft cap are is tested beside the model; here, that nothing loses them.
"""

import functools

import numpy as np
import pytest

from titan.core.config.flags import parse
from titan.graph.testing.xla_cpu import compile_quickly
from titan.models.layers.attention import SdpaAttentionConfig
from titan.models.layers.rope import NoRotaryConfig
from titan.models.muse_glimmer.config import MuseGlimmerConfig, muse_glimmer_30b
from titan.train.assembly import components
from titan.train.build import build
from titan.train.config.run import Config
from titan.train.runtime.xla import XlaRuntime
from titan.train.step.state import LEARNING_RATE
from titan.train.swaps.rope import RotaryKernelConfig
from titan.train.swaps.scan_layers import with_scanned_layers
from titan.train.testing.grid import grid

NUM_STEPS = 3
# Two turns of a layer with a window and a global one. No block divides the sequence, no tile the vocabulary; the window
# is shorter than a document, and logits reach into the bend of the soft cap.
MODEL = MuseGlimmerConfig(
    vocab_size=300,
    dim=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_dim=48,
    window=20,
    global_interval=2,
    logit_scale=30.0,
)
FLAGS = (
    "--tokenizer.vocab_size=300",
    "--training.sequence_length=150",
    "--training.batch_size=4",
    "--parallelism.num_devices=2",
    "--compile.cache_folder=",
)
KERNELS = (
    "--splash_attention_kernel.enable",
    "--fused_linear_cross_entropy.enable",
    "--rope_kernel.enable",
)
SCAN = "--tpu_config.use_scan_layers"


def _config(*flags: str) -> Config:
    return parse(["test", *FLAGS, *flags], Config(model=MODEL))


@functools.cache
def _runtime() -> XlaRuntime:
    compile_quickly()
    return XlaRuntime(_config())


def _batch(draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Documents of some forty tokens, packed, with padding at the end of each row."""
    shape = (1, 4, 150)
    segment_ids = np.sort(draw.integers(1, 5, shape, dtype=np.int32))
    segment_ids[..., 140:] = 0
    labels = draw.integers(0, 300, shape, dtype=np.int32)
    labels[segment_ids == 0] = -100
    return {
        "tokens": draw.integers(0, 300, shape, dtype=np.int32),
        "labels": labels,
        "positions": np.broadcast_to(np.arange(150, dtype=np.int32), shape).copy(),
        "segment_ids": segment_ids,
        LEARNING_RATE: np.float32(1e-3),
    }


@functools.cache
def _run(*flags: str) -> tuple[np.ndarray, frozenset[str], frozenset[str]]:
    """Loss and gradient norm of each step, the ops in the graph and its loops, and the layers' names in the state."""
    run = build(_config(*flags), _runtime())
    # Norms that begin at zero would begin with logits of zero, whatever the layers do.
    state = {name: value + 0.5 if "norm" in name else value for name, value in run.initial_state().items()}
    measured, draw = [], np.random.default_rng(0)
    for _ in range(NUM_STEPS):
        batch = _batch(draw)
        executable = run.train_step.executable_for(batch)
        state, metrics = executable(state, executable.place(batch))
        measured.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    graphs = (module.graph for module in executable.graph.module.modules() if hasattr(module, "graph"))
    ops = frozenset(str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function")
    queries = (name.partition(".attention.wq.")[0] for name in state if name.endswith(".attention.wq.weight"))
    layers = frozenset(name.removeprefix("params/") for name in queries if name.startswith("params/"))
    return np.array(measured), ops, layers


@pytest.mark.parametrize(
    "flags",
    grid(
        {
            "full": ("--compile.memory_policy=full",),
            "scan_offload": (SCAN, "--compile.memory_policy=offload"),
            "scan_selective_kernels": (SCAN, "--compile.memory_policy=selective", *KERNELS),
        },
        {"full"},
    ),
)
def test_losses_and_gradient_norms_are_those_of_the_plain_run(flags):
    expected, plain_ops, plain_layers = _run("--model.attention=sdpa")
    measured, ops, layers = _run(*flags)
    assert plain_layers == {f"layers.{index}" for index in range(4)}
    assert layers == ({"layers.0.0+2i", "layers.0.1+2i"} if SCAN in flags else plain_layers)
    for kernel in ("splash_attention", "linear_cross_entropy", "rotate_heads"):
        assert any(f"titan.{kernel}" in op for op in ops) == (KERNELS[0] in flags)
        assert not any(f"titan.{kernel}" in op for op in plain_ops)
    assert (np.abs(expected[:, 0] - np.log(300)) > 0.1).all()  # the logits are not uniform
    # A window of 21 rather than 20 moves losses by 4e-3 and gradient norms by 0.1. AdamW's first steps divide each
    # gradient by itself, so that the gradients after them no longer agree to rounding, while losses do.
    np.testing.assert_allclose(measured[:, 0], expected[:, 0], rtol=1e-5)
    np.testing.assert_allclose(measured[0, 1], expected[0, 1], rtol=1e-5)


def test_swaps_take_window_cap_and_pairs_from_the_nodes_that_they_replace():
    layers = components(_config(*KERNELS)).layers
    assert [layer.attention.inner.window for layer in layers] == [20, 0, 20, 0]
    scale = MODEL.query_scale * MODEL.head_dim**-0.5
    assert {layer.attention.inner.scale for layer in layers} == {scale}
    assert [layer.attention.rotary for layer in layers] == [RotaryKernelConfig(True, "auto"), NoRotaryConfig()] * 2
    plain = components(_config("--model.attention=sdpa")).layers
    assert [layer.attention.inner for layer in plain] == [
        SdpaAttentionConfig(scale, 20),
        SdpaAttentionConfig(scale),
    ] * 2


def test_the_layers_of_the_published_size_are_one_loop_of_thirteen_turns():
    (loop,) = with_scanned_layers(muse_glimmer_30b().components()).layers
    assert (loop.first, loop.num_turns, len(loop.blocks)) == (0, 13, 4)
    assert [block.attention.inner.window for block in loop.blocks] == [2048, 2048, 2048, 0]
