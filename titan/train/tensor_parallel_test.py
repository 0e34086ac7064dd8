"""Tensor parallelism in training: every family split over devices, alone and with FSDP and HSDP, equals one device."""

import dataclasses
import functools
import os
from typing import Any

import numpy as np
import pytest

from titan.core.config.validate import ConfigError
from titan.core.init import Normal, Zeros, init_plan, sample
from titan.graph.capture import capture
from titan.graph.passes.pipeline import run_passes
from titan.graph.spmd_check import check_spmd
from titan.graph.step_graph import StepGraph
from titan.models.llama3.config import Llama3Config
from titan.models.muse_glimmer.config import MuseGlimmerConfig
from titan.models.qwen3.config import Qwen3Config, Qwen3MoeConfig
from titan.train.build import components, graph_passes, with_loops
from titan.train.compile_config import CompileConfig, TpuConfig
from titan.train.config import Config, OptimizerConfig, TrainingConfig
from titan.train.mesh_axes import mesh_spec, sharding_policy
from titan.train.model_split import model_split
from titan.train.parallelism_config import ParallelismConfig
from titan.train.stacks import Stacks
from titan.train.state import (
    EXP_AVG,
    LEARNING_RATE,
    PARAMS,
    PER_PARAMETER,
    batch_layouts,
    parameter_layouts,
    train_state_layouts,
)
from titan.train.step import StepBuilder
from titan.train.swaps.config import FusedLinearCrossEntropyConfig
from titan.train.swaps.scan_layers import stacked_parameters

NUM_DEVICES = 8
os.environ.setdefault("NPROC", str(4 * NUM_DEVICES))  # see XlaRuntime

import jax  # noqa: E402 (after NPROC)

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)

from titan.graph.executors.xla import abstract_arrays, jax_mesh, lower_xla  # noqa: E402

_SIZES = {"vocab_size": 120, "dim": 32, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8}
MODELS = {
    "llama3": Llama3Config(**_SIZES, ffn_dim=48),
    "qwen3_tied": Qwen3Config(**_SIZES, ffn_dim=48, tie_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, num_experts=6, num_active_experts=2, expert_ffn_dim=24),
    # The window is shorter than a document.
    "muse_glimmer": MuseGlimmerConfig(**_SIZES, ffn_dim=48, window=4, global_interval=2, logit_scale=3.0),
}
BATCH, LENGTH, NUM_STEPS = 8, 16, 3
TOLERANCE = 1e-5  # of the largest value: float32 sums in another order
# The programs are run three times each: effort in generating machine code is wasted.
_FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
}


def config_of(model: str, *, scan: bool = False, fused: str = "", policy: str = "none", **parallelism: Any) -> Config:
    microbatches = parallelism.pop("microbatches", 1)
    config = Config(
        model=MODELS[model],
        parallelism=ParallelismConfig(**{"data_parallel_shard": 1, **parallelism}),
        training=TrainingConfig(batch_size=BATCH, sequence_length=LENGTH, microbatches=microbatches),
        # A large epsilon: AdamW would else turn the rounding of a gradient near zero into a step of any size.
        optimizer=OptimizerConfig(epsilon=1e-2),
        tpu_config=TpuConfig(use_scan_layers=scan),
        compile=CompileConfig(memory_policy=policy),
        fused_linear_cross_entropy=FusedLinearCrossEntropyConfig(enable=bool(fused), implementation=fused or "auto"),
    )
    config.parallelism.validate()
    config.model.validate()
    return config


@functools.cache
def batch(microbatches: int) -> dict[str, np.ndarray]:
    """Two documents in each row, and in some rows padding after them."""
    random = np.random.default_rng(0)
    index = np.arange(LENGTH)[None]
    cut, end = random.integers(3, 8, (BATCH, 1)), random.integers(10, LENGTH + 1, (BATCH, 1))
    tokens = random.integers(0, 120, (BATCH, LENGTH))
    segment_ids = np.where(index >= end, 0, np.where(index >= cut, 2, 1))
    arrays = {
        "tokens": tokens,
        "labels": np.where(segment_ids > 0, np.roll(tokens, -1, 1), -100),
        "positions": np.where(index >= cut, index - cut, index),
        "segment_ids": segment_ids,
    }
    parts = {name: array.astype(np.int32).reshape(microbatches, -1, LENGTH) for name, array in arrays.items()}
    return {**parts, LEARNING_RATE: np.float32(1e-3)}


@functools.cache
def initial_parameters(model: Any) -> dict[str, np.ndarray]:
    built = model.components().build()
    plan = init_plan(built)
    # Where norms begin at zero all other weights would have no gradient.
    special = Normal(0.1) if Zeros() in plan.values() else None
    return {
        name: np.array(sample(special or plan[name], 0, name, tuple(weight.shape), "float32"))
        for name, weight in built.named_parameters()
    }


def steps_of(config: Config) -> tuple[StepBuilder, Stacks]:
    mesh, policy = mesh_spec(config.parallelism), sharding_policy(config.parallelism)
    build = with_loops(components(config), config.tpu_config).build
    model = build()
    stacks, split = Stacks(stacked_parameters(model)), model_split(config, model)
    layouts = parameter_layouts(model, mesh, policy, stacks, split.plans)
    training = config.training
    steps = StepBuilder(
        build, layouts, policy, config.optimizer, 1.0, training.microbatches, split.plans, split.borders
    )
    return steps, stacks


def captured(config: Config) -> StepGraph:
    steps, _ = steps_of(config)
    mesh = mesh_spec(config.parallelism)
    shapes = {name: np.shape(array) for name, array in batch(config.training.microbatches).items()}
    layouts = train_state_layouts(steps.parameters, mesh), batch_layouts(shapes, mesh)
    graph = capture(steps.train_step, *layouts, mesh)
    if mesh.num_devices > 1:
        check_spmd(graph, capture(steps.train_step, *layouts, mesh, rank=mesh.num_devices - 1))
    return run_passes(graph, graph_passes(config))[0]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Metrics of each step; first moments (a tenth of the clipped gradients) after one, parameters after all."""

    metrics: list[dict[str, float]]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]


@functools.cache
def run_xla(config: Config) -> Outcome:
    graph, (_, stacks) = captured(config), steps_of(config)
    executable = lower_xla(graph, jax.devices(), compiler_options=_FAST_COMPILE).compile()
    mesh = mesh_spec(config.parallelism)
    abstract = abstract_arrays(graph.state, mesh, jax_mesh(mesh, jax.devices()))
    initial = {
        name: np.zeros(layout.shape, str(layout.dtype).removeprefix("torch.")) for name, layout in graph.state.items()
    }
    by_layer = {f"{PARAMS}{name}": array for name, array in initial_parameters(config.model).items()}
    names = [name for name in initial if name.startswith(PARAMS)]
    initial |= stacks.in_state(PER_PARAMETER).stacked(by_layer, names, np.stack)
    state = {name: jax.device_put(array, abstract[name].sharding) for name, array in initial.items()}
    arrays = executable.place(batch(config.training.microbatches))

    def layers(kind: str) -> dict[str, np.ndarray]:
        kept = {name: np.asarray(array) for name, array in state.items() if name.startswith(kind)}
        return stacks.in_state((kind,)).unstacked(kept, lambda stack, turn: stack[turn])

    metrics, gradients = [], {}
    for _ in range(NUM_STEPS):
        state, values = executable(state, arrays)
        metrics.append({name: float(value) for name, value in values.items()})
        gradients = gradients or layers(EXP_AVG)
    return Outcome(metrics, gradients, layers(PARAMS))


def assert_same(got: Outcome, expected: Outcome) -> None:
    for step, expected_step in zip(got.metrics, expected.metrics, strict=True):
        for name, value in expected_step.items():
            assert abs(step[name] - value) <= TOLERANCE * abs(value), (name, step[name], value)
    for kind in ("gradients", "parameters"):
        arrays, others = getattr(got, kind), getattr(expected, kind)
        assert arrays.keys() == others.keys()
        for name, array in others.items():
            largest = np.abs(array).max()
            assert largest > 0, name
            assert np.abs(arrays[name] - array).max() <= TOLERANCE * largest, (kind, name)


CASES = {
    "llama3_tp2": ("llama3", {"tensor_parallel": 2}),
    "llama3_tp4_whole_tokens": ("llama3", {"tensor_parallel": 4, "sequence_parallel": False}),
    "llama3_fsdp2_tp2_scan": ("llama3", {"data_parallel_shard": 2, "tensor_parallel": 2, "scan": True}),
    "tied_fsdp2_tp2": ("qwen3_tied", {"data_parallel_shard": 2, "tensor_parallel": 2}),
    "tied_fsdp2_tp4_fused": ("qwen3_tied", {"data_parallel_shard": 2, "tensor_parallel": 4, "fused": "xla"}),
    "moe_fsdp2_tp2": ("qwen3_moe", {"data_parallel_shard": 2, "tensor_parallel": 2}),
    "moe_tp4_whole_tokens": ("qwen3_moe", {"tensor_parallel": 4, "sequence_parallel": False, "scan": True}),
    "muse_fsdp2_tp2": ("muse_glimmer", {"data_parallel_shard": 2, "tensor_parallel": 2, "policy": "full"}),
    "muse_hsdp4_tp2_microbatches_fused": (
        "muse_glimmer",
        {
            "data_parallel_replicate": 2,
            "data_parallel_shard": 2,
            "tensor_parallel": 2,
            "microbatches": 2,
            "fused": "mosaic",
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_devices_that_share_the_work_equal_one(case):
    model, options = CASES[case]
    assert_same(run_xla(config_of(model, **options)), run_xla(config_of(model)))
