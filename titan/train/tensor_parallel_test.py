"""Tensor parallelism in training: every family split over devices, alone and with FSDP and HSDP, equals one device."""

import collections
import dataclasses
import functools
import os
from typing import Any

import numpy as np
import pytest

from titan.core.config.validate import ConfigError
from titan.core.data.config import TokenizerConfig
from titan.core.init import Normal, Zeros, init_plan, sample
from titan.graph.capture import capture
from titan.graph.dialect import op_name
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
    eval_state_layouts,
    parameter_layouts,
    train_state_layouts,
)
from titan.train.step import StepBuilder
from titan.train.swaps.config import FusedLinearCrossEntropyConfig, RopeKernelConfig, SplashAttentionKernelConfig
from titan.train.swaps.scan_layers import stacked_parameters

NUM_DEVICES = 8
os.environ.setdefault("NPROC", str(4 * NUM_DEVICES))  # see XlaRuntime

import jax  # noqa: E402 (after NPROC)

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)

from titan.graph.executors.xla import XlaExecutable, abstract_arrays, jax_mesh, lower_xla  # noqa: E402

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


def config_of(
    model: str,
    *,
    scan: bool = False,
    fused: str = "",
    kernels: bool = False,
    policy: str = "none",
    **parallelism: Any,
) -> Config:
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
        splash_attention_kernel=SplashAttentionKernelConfig(use_splash_attention_kernel=kernels),
        rope_kernel=RopeKernelConfig(enable=kernels),
        use_grouped_mm=kernels and hasattr(MODELS[model], "num_experts"),
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
    steps = StepBuilder(
        build_model=build,
        batch=config.model.batch_tensors(LENGTH),
        loss_module=config.model.loss_module,
        parameters=layouts,
        policy=policy,
        optimizer=config.optimizer,
        max_grad_norm=1.0,
        num_microbatches=config.training.microbatches,
        plans=split.plans,
        borders=split.borders,
    )
    return steps, stacks


def captured(config: Config, *, evaluate: bool = False) -> StepGraph:
    steps, _ = steps_of(config)
    mesh = mesh_spec(config.parallelism)
    shapes = {name: np.shape(array) for name, array in batch(config.training.microbatches).items()}
    if evaluate:
        del shapes[LEARNING_RATE]
    state = eval_state_layouts(steps.parameters) if evaluate else train_state_layouts(steps.parameters, mesh)
    layouts = state, batch_layouts(steps.batch, shapes, mesh)
    step = steps.eval_step if evaluate else steps.train_step
    graph = capture(step, *layouts, mesh)
    if mesh.num_devices > 1:
        check_spmd(graph, capture(step, *layouts, mesh, rank=mesh.num_devices - 1))
    return run_passes(graph, graph_passes(config))[0]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Metrics of each step; first moments (a tenth of the clipped gradients) after one, parameters after all."""

    metrics: list[dict[str, float]]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]


def started(config: Config, graph: StepGraph) -> tuple[XlaExecutable, dict[str, jax.Array], dict[str, jax.Array]]:
    """The compiled step, its first state, and the batch."""
    executable = lower_xla(graph, jax.devices(), compiler_options=_FAST_COMPILE).compile()
    mesh, (_, stacks) = mesh_spec(config.parallelism), steps_of(config)
    abstract = abstract_arrays(graph.state, mesh, jax_mesh(mesh, jax.devices()))
    initial = {
        name: np.zeros(layout.shape, str(layout.dtype).removeprefix("torch.")) for name, layout in graph.state.items()
    }
    by_layer = {f"{PARAMS}{name}": array for name, array in initial_parameters(config.model).items()}
    names = [name for name in initial if name.startswith(PARAMS)]
    initial |= stacks.in_state(PER_PARAMETER).stacked(by_layer, names, np.stack)
    state = {name: jax.device_put(array, abstract[name].sharding) for name, array in initial.items()}
    return executable, state, executable.place(batch(config.training.microbatches))


def evaluated(config: Config) -> dict[str, float]:
    executable, state, arrays = started(config, captured(config, evaluate=True))
    return {name: float(value) for name, value in executable(state, arrays)[1].items()}


@functools.cache
def run_xla(config: Config) -> Outcome:
    executable, state, arrays = started(config, captured(config))
    _, stacks = steps_of(config)

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
    "llama3_hsdp4_tp2": (
        "llama3",
        {"data_parallel_replicate": 2, "data_parallel_shard": 2, "tensor_parallel": 2},
    ),
    "llama3_tp4_whole_tokens": ("llama3", {"tensor_parallel": 4, "sequence_parallel": False}),
    "llama3_fsdp2_tp2_scan": ("llama3", {"data_parallel_shard": 2, "tensor_parallel": 2, "scan": True}),
    "tied_fsdp2_tp2": ("qwen3_tied", {"data_parallel_shard": 2, "tensor_parallel": 2}),
    "tied_fsdp2_tp4_kernels": (
        "qwen3_tied",
        {"data_parallel_shard": 2, "tensor_parallel": 4, "fused": "xla", "kernels": True},
    ),
    "moe_fsdp2_tp4": ("qwen3_moe", {"data_parallel_shard": 2, "tensor_parallel": 4}),
    "moe_tp4_whole_tokens_kernels": (
        "qwen3_moe",
        {"tensor_parallel": 4, "sequence_parallel": False, "scan": True, "kernels": True},
    ),
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


def test_an_evaluation_equals_that_of_one_device():
    split = evaluated(config_of("muse_glimmer", data_parallel_shard=2, tensor_parallel=2))
    assert split == pytest.approx(evaluated(config_of("muse_glimmer")), rel=TOLERANCE)


@pytest.mark.parametrize("model", ["muse_glimmer", "qwen3_moe"])
def test_each_block_gathers_once_and_scatters_once(model):
    graph = captured(config_of(model, tensor_parallel=2))
    counts = collections.Counter(
        (node.meta["region"], node.meta["module_fqn"], op_name(node.target).split(".")[1])
        for node in graph.module.graph.nodes
        if node.op == "call_function" and "tp" in node.args and op_name(node.target) != "titan.axis_index.default"
    )
    blocks = [f"layers.{index}.{block}" for index in range(2) for block in ("attention", "feed_forward")]
    gather, scatter = "all_gather_along", "reduce_scatter_along"
    # The backward of each is the other.
    expected = {
        (region, block, op): 1 for region in ("forward", "backward") for block in blocks for op in (gather, scatter)
    }
    expected[("forward", "embedding", scatter)] = expected[("backward", "embedding", gather)] = 1
    expected[("loss", "cross_entropy", gather)] = expected[("backward", "cross_entropy", scatter)] = 1
    expected[("loss", "cross_entropy", "all_reduce")] = 2
    activations = {key: count for key, count in counts.items() if key[1] in (*blocks, "embedding", "cross_entropy")}
    assert activations == expected
    # The rest are sums of gradients of whole weights, and of the squares of the gradients' norm.
    assert {op for region, module, op in set(counts) - set(activations)} == {"all_reduce"}


@pytest.mark.parametrize(
    "model, changes, message",
    [
        ("llama3", {"tensor_parallel": 8}, "--parallelism.tensor_parallel: 8 does not divide model.num_kv_heads=4; "),
        ("muse_glimmer", {"tensor_parallel": 3}, "--parallelism.tensor_parallel: 3 does not divide model.num_kv_heads"),
        (
            "qwen3_moe",
            {"tensor_parallel": 2, "expert_ffn_dim": 25},
            "--parallelism.tensor_parallel: 2 does not divide model.expert_ffn_dim=25; give a divisor of it",
        ),
        (
            "qwen3_tied",
            {"tensor_parallel": 2, "vocab_size": 121},
            "--parallelism.tensor_parallel: 2 does not divide model.vocab_size=121; give a divisor of it",
        ),
        (
            "llama3",
            {"tensor_parallel": 2, "sequence_length": 15},
            "--training.sequence_length: 15 tokens cannot be split over tensor_parallel=2; give a multiple of 2, or "
            "--parallelism.sequence_parallel=false",
        ),
        (
            "llama3",
            {"tensor_parallel": 4, "context_parallel": 2, "sequence_length": 20},
            "--training.sequence_length: 20 tokens cannot be split over tensor_parallel=4 x context_parallel=2; give a "
            "multiple of 8, ",
        ),
        (
            "llama3",
            {"tensor_parallel": 2, "gradients": "forward"},
            "--fused_linear_cross_entropy.gradients: forward needs the logits of the whole vocabulary at once, which ",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(model, changes, message):
    changes = dict(changes)
    sizes = {name: changes.pop(name) for name in ("expert_ffn_dim", "vocab_size") if name in changes}
    length, gradients = changes.pop("sequence_length", LENGTH), changes.pop("gradients", "backward")
    config = Config(
        model=dataclasses.replace(MODELS[model], **sizes),
        parallelism=ParallelismConfig(**changes),
        training=TrainingConfig(sequence_length=length),
        fused_linear_cross_entropy=FusedLinearCrossEntropyConfig(enable=True, gradients=gradients),
        tokenizer=TokenizerConfig(vocab_size=100),
    )
    with pytest.raises(ConfigError) as error:
        config.validate()
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    # A split of the model alone is what is wrong.
    dataclasses.replace(config, parallelism=ParallelismConfig()).validate()
