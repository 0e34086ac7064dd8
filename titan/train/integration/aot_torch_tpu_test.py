"""titan's lowering and TorchTPU's against each other; docs/aot.md says how to make the environment that this needs."""

import os

# Before torch is imported: it would load TorchTPU, which changes what is captured.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import numpy as np
import pytest
import torch

from titan.core.config.flags import parse
from titan.core.config.validate import ConfigError
from titan.core.data.packing import IGNORED_LABEL
from titan.graph.executors.xla import lower_xla
from titan.graph.ir.step_graph import StepGraph
from titan.graph.lowering.stablehlo_call import StableHloCall
from titan.graph.torch_tpu.lower import lower_by_torch_tpu
from titan.train.aot.command import compile_ahead_of_time
from titan.train.build import build
from titan.train.config.run import Config
from titan.train.recipes.qwen3_moe_debug import RECIPE as MOE_RECIPE
from titan.train.runtime.xla import XlaRuntime
from titan.train.step.state import LEARNING_RATE

_NUM_DEVICES = 4
_SMALL = (
    "--model.num_layers=2",
    "--model.vocab_size=512",
    "--tokenizer.vocab_size=512",
    "--training.sequence_length=64",
    "--training.batch_size=8",
)
_CPU = (
    f"--parallelism.num_devices={_NUM_DEVICES}",
    "--parallelism.data_parallel_replicate=2",
    "--compile.cache_folder=",
    # So large that the update of a weight whose gradient is nearly zero does not hang on the last digits of that.
    "--optimizer.epsilon=1e-3",
)
_BFLOAT16 = ("--parallelism.gather_dtype=bfloat16",)
_KERNELS = ("--splash_attention_kernel.enable", "--rope_kernel.enable")


@pytest.fixture
def runtime():
    """Of CPU devices; it keeps the graphs that it compiles."""
    config = parse(["llama3_debug", *_SMALL, *_CPU], Config())
    return XlaRuntime(config)


def batch_of(config) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shape = (1, config.training.batch_size, config.training.sequence_length)
    labels = random.integers(0, 512, shape, dtype=np.int32)
    labels[random.random(shape) < 0.3] = IGNORED_LABEL
    return {
        "tokens": random.integers(0, 512, shape, dtype=np.int32),
        "labels": labels,
        "positions": np.broadcast_to(np.arange(shape[2], dtype=np.int32) % 40, shape).copy(),
        "segment_ids": np.broadcast_to(1 + np.arange(shape[2], dtype=np.int32) // 40, shape).copy(),
        LEARNING_RATE: np.float32(1e-2),
    }


def calls(graph: StepGraph) -> list[StableHloCall]:
    modules = (part for part in graph.module.modules() if isinstance(part, torch.fx.GraphModule))
    nodes = (node for module in modules for node in module.graph.nodes)
    return [node.target for node in nodes if isinstance(node.target, StableHloCall)]


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        (Config(), ()),
        (Config(), (*_KERNELS, "--tpu_config.use_scan_layers", "--model.num_layers=4")),
        (MOE_RECIPE, ("--grouped_matmul",)),
    ],
    ids=["llama3", "kernels in scanned layers", "mixture of experts"],
)
def test_new_state_and_metrics_are_equal_on_a_mesh(runtime, monkeypatch, recipe, flags):
    config = parse([recipe.name, *_SMALL, *_CPU, *flags], recipe)
    graphs: list[StepGraph] = []
    compile_graph = runtime.compile
    monkeypatch.setattr(
        runtime, "compile", lambda graph, seconds: (graphs.append(graph), compile_graph(graph, seconds))[1]
    )
    run = build(config, runtime)
    assert str(run.mesh) == "dp_replicate=2 x dp_shard=2"
    batch = batch_of(config)
    results = []
    executable = run.train_step.executable_for(batch)
    lowered = lower_by_torch_tpu(graphs[0])
    texts = "".join(call.text for call in calls(lowered))
    for scope in ("forward/layers", "backward/layers", "loss/cross_entropy", "optimizer"):
        assert f'loc("{scope}' in texts
    for step in (executable, lower_xla(lowered, list(executable.mesh.devices.flat)).compile()):
        state, metrics = run.initial_state(), {}
        for _ in range(2):  # the second step's gradients are those of moments and weights that are not at their start
            state, metrics = step(state, step.place(batch))
        results.append({name: np.array(array) for name, array in {**state, **metrics}.items()})
    ours, theirs = results
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert np.isfinite(array).all(), name
        # Sums of float32 in another order.
        error, scale = np.abs(array - theirs[name]).max(), np.abs(array).max()
        assert error <= 2e-5 * scale, f"{name}: off by {error} of at most {scale}"


@pytest.mark.parametrize("flags", [_BFLOAT16, (*_BFLOAT16, *_KERNELS)], ids=["plain", "kernels"])
def test_programs_for_a_slice_agree(flags):
    ours, theirs = (
        compile_ahead_of_time(
            parse(
                ["x", *_SMALL, "--aot", "--hardware=v6e-2x2", f"--aot.lowering={lowering}", *flags],
                Config(),
            )
        )
        for lowering in ("titan", "torch_tpu")
    )
    assert "torch_tpu" in theirs.versions and "torch_tpu" not in ours.versions
    # Both donate the state: a second copy of it would raise the peak by more than a third. The rest differs by what XLA
    # makes of other elementwise ops and dtypes between them.
    assert theirs.memory.needed == pytest.approx(ours.memory.needed, rel=0.1)
    assert theirs.memory.parameters == ours.memory.parameters
    assert theirs.compute.compiled_flops == pytest.approx(ours.compute.compiled_flops, rel=0.05)
    assert [(row.axes, row.kind, row.count, row.bytes) for row in theirs.collectives] == [
        (row.axes, row.kind, row.count, row.bytes) for row in ours.collectives
    ]


def test_an_op_that_torch_tpu_has_not_is_named_with_its_module(monkeypatch):
    silu = torch.nn.functional.silu
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x, **_: silu(x) + torch.special.bessel_j0(x.detach()))
    config = parse(["x", *_SMALL, "--aot", "--hardware=v6e-2x2", "--aot.lowering=torch_tpu"], Config())
    with pytest.raises(ConfigError) as error:
        compile_ahead_of_time(config)
    assert "aot.lowering: TorchTPU does not lower node special_bessel_j0" in str(error.value)
    assert "in module layers.0.feed_forward" in str(error.value)
    assert "\n" not in str(error.value)
