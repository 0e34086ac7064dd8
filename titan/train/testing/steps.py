"""Steps of small models for tests: in every form (loops, meshes, memory policies), captured and run once."""

import dataclasses
import functools
import os
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from titan.core.data.config import TokenizerConfig
from titan.core.init import Normal, Zeros, init_plan, sample
from titan.graph.capture.spmd_check import check_spmd
from titan.graph.capture.trace import capture
from titan.graph.executors.torch import TorchExecutable
from titan.graph.ir.step_graph import StepGraph
from titan.graph.passes.pipeline import run_passes
from titan.models.flux.config import FluxConfig
from titan.models.llama3.config import Llama3Config
from titan.models.muse_glimmer.config import MuseGlimmerConfig
from titan.models.qwen3.config import Qwen3Config, Qwen3MoeConfig
from titan.parallel.mesh import MeshSpec
from titan.train.build import components, graph_passes, step_builder
from titan.train.config.compile import CompileConfig, TpuConfig
from titan.train.config.expert_balance import ExpertBalanceConfig
from titan.train.config.kernels import FusedLinearCrossEntropyConfig, RopeKernelConfig, SplashAttentionKernelConfig
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.run import Config, OptimizerConfig, TrainingConfig
from titan.train.sharding.token_order import in_mesh_order
from titan.train.step.builder import StepBuilder
from titan.train.step.state import (
    EXP_AVG,
    EXPERT_BIAS,
    LEARNING_RATE,
    PARAMS,
    PER_PARAMETER,
    batch_layouts,
    eval_state_layouts,
    expert_bias_layouts,
    train_state_layouts,
)
from titan.train.step.stored_form import Stacks

NUM_DEVICES = 8
os.environ.setdefault("NPROC", str(4 * NUM_DEVICES))  # see XlaRuntime

import jax  # noqa: E402 (after NPROC)

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)

from titan.graph.executors.xla import XlaExecutable, abstract_arrays, jax_mesh, lower_xla  # noqa: E402
from titan.graph.split.executable import SplitExecutable, compile_split  # noqa: E402

ONE = MeshSpec((), ())
FSDP = MeshSpec(("dp_shard",), (2,))
HSDP = MeshSpec(("dp_replicate", "dp_shard"), (2, 2))
BATCH, LENGTH = 8, 16
DIM, FFN_DIM, NUM_LAYERS, NUM_STEPS = 32, 48, 3, 3

_SIZES = {"vocab_size": 100, "dim": DIM, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def _patterned() -> Any:
    """A wide and a narrow layer in turn, twice, and a wide one alone."""
    wide = Llama3Config(**_SIZES, ffn_dim=FFN_DIM, num_layers=5).components()
    narrow = Llama3Config(**_SIZES, ffn_dim=FFN_DIM // 2, num_layers=5, attention="sdpa").components()
    layers = tuple((narrow if index % 2 else wide).layers[index] for index in range(5))
    return dataclasses.replace(wide, layers=layers)


_MIXTURE = Qwen3MoeConfig(**_SIZES, num_layers=2, num_experts=8, num_active_experts=2, expert_ffn_dim=24)

# With heads for four devices to share.
_SHARED = {**_SIZES, "num_heads": 8, "num_kv_heads": 4, "num_layers": 2}

# With fewer heads of keys and values than four devices.
_FEW = {**_SHARED, "num_kv_heads": 2}

# Of the 16 tokens of a row 6 are for the texts of its two pictures.
_FLUX = FluxConfig(
    dim=DIM,
    num_double_blocks=2,
    num_single_blocks=2,
    num_heads=2,
    rope_dims=(4, 6, 6),
    in_channels=8,
    text_dim=12,
    pooled_dim=10,
    guidance_embedding=True,
    text_length=3,
    pictures_per_row=2,
)
# With heads for four devices to share.
_FLUX_SHARED = dataclasses.replace(_FLUX, num_heads=4, rope_dims=(2, 2, 4))


_KERNELS = {
    "splash_attention_kernel": SplashAttentionKernelConfig(use_splash_attention_kernel=True),
    "rope_kernel": RopeKernelConfig(enable=True),
}

_CONFIGS = {
    "llama3": Config(model=Llama3Config(**_SIZES, ffn_dim=FFN_DIM, num_layers=NUM_LAYERS)),
    "llama3_deep": Config(model=Llama3Config(**_SIZES, ffn_dim=FFN_DIM, num_layers=4 * NUM_LAYERS)),
    "llama3_shared": Config(model=Llama3Config(**_SHARED, ffn_dim=FFN_DIM)),
    "qwen3": Config(model=Qwen3Config(**_SIZES, ffn_dim=FFN_DIM, num_layers=NUM_LAYERS, tie_embeddings=True)),
    "qwen3_shared": Config(model=Qwen3Config(**_SHARED, ffn_dim=FFN_DIM, tie_embeddings=True, attention="sdpa")),
    "qwen3_moe": Config(model=_MIXTURE),
    "qwen3_moe_grouped": Config(model=_MIXTURE, use_pallas_paired_grouped_mm=True),
    "qwen3_moe_dropping": Config(model=dataclasses.replace(_MIXTURE, capacity_factor=1.0)),
    # Experts in a number that four devices do not divide.
    "qwen3_moe_shared": Config(model=Qwen3MoeConfig(**_SHARED, num_experts=6, num_active_experts=2, expert_ffn_dim=24)),
    # The window is shorter than a document. Over four devices it is longer than a chunk of a sequence.
    "muse_glimmer_shared": Config(
        model=MuseGlimmerConfig(**_SHARED, ffn_dim=FFN_DIM, window=3, global_interval=2, logit_scale=3.0)
    ),
    "qwen3_few": Config(model=Qwen3Config(**_FEW, ffn_dim=FFN_DIM)),
    "qwen3_moe_few": Config(model=Qwen3MoeConfig(**_FEW, num_experts=6, num_active_experts=2, expert_ffn_dim=24)),
    "muse_glimmer_few": Config(
        model=MuseGlimmerConfig(**_FEW, ffn_dim=FFN_DIM, window=3, global_interval=2, logit_scale=3.0)
    ),
    "flux": Config(model=_FLUX),
    "flux_shared": Config(model=_FLUX_SHARED),
    "flux_fused": Config(
        model=dataclasses.replace(_FLUX_SHARED, split_projection=False, rope="matrix", qkv_unpack="permute")
    ),
    "flux_kernels": Config(model=_FLUX, **_KERNELS),
    "flux_release": Config(model=dataclasses.replace(_FLUX, rope="matrix", qkv_unpack="permute", attention="sdpa")),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One form of one model's step.

    Attributes:
      model: a key of `_CONFIGS`, or "pattern".
      mesh: the devices.
      scan: whether layers are loops.
      split: whether the step is in pieces.
      memory_policy, prefetch, reshard, sequence_parallel: the flags of these names.
      microbatches: parts of the batch.
      gather_dtype: that of the parameters in use, as in the flag.
      balance: of the experts, where there are any.
      kernels: attention, RoPE and experts by what stands in for the kernels on CPUs.
      fused_loss: head and loss as one op, of this implementation.
    """

    model: str
    mesh: MeshSpec = ONE
    scan: bool = False
    split: bool = False
    memory_policy: str = "none"
    prefetch: int = 1
    reshard: bool = True
    microbatches: int = 1
    gather_dtype: str = ""
    balance: ExpertBalanceConfig = ExpertBalanceConfig()
    sequence_parallel: bool = True
    kernels: bool = False
    fused_loss: str = ""

    @property
    def config(self) -> Config:
        """The configuration that means it; for the model "pattern", all of it but the layers."""
        of_model = _CONFIGS["llama3" if self.model == "pattern" else self.model]
        changes: dict[str, Any] = {}
        if self.kernels:
            changes |= {**_KERNELS, "use_grouped_mm": hasattr(of_model.model, "num_experts")}
        if self.fused_loss:
            loss = FusedLinearCrossEntropyConfig(enable=True, implementation=self.fused_loss)
            changes["fused_linear_cross_entropy"] = loss
        return dataclasses.replace(
            of_model,
            parallelism=ParallelismConfig(
                num_devices=self.mesh.num_devices,
                data_parallel_replicate=self.mesh.size("dp_replicate"),
                data_parallel_shard=self.mesh.size("dp_shard"),
                expert_parallel=self.mesh.size("ep"),
                context_parallel=self.mesh.size("cp"),
                tensor_parallel=self.mesh.size("tp"),
                sequence_parallel=self.sequence_parallel,
                gather_dtype=self.gather_dtype,
                reshard_after_forward=self.reshard,
            ),
            training=TrainingConfig(batch_size=BATCH, sequence_length=LENGTH, microbatches=self.microbatches),
            # So large an epsilon that an update follows its gradient: AdamW would else turn the rounding of a gradient
            # near zero into a step of any size.
            optimizer=OptimizerConfig(epsilon=1e-2),
            tokenizer=TokenizerConfig(vocab_size=100),
            expert_balance=self.balance,
            tpu_config=TpuConfig(use_scan_layers=self.scan, use_graph_split=self.split),
            compile=CompileConfig(memory_policy=self.memory_policy, offload_prefetch=self.prefetch),
            **changes,
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the steps gave.

    Attributes:
      metrics: those of each step.
      gradients: parameter, layer by layer, to a tenth of its clipped gradient in the first step (the first moment).
      parameters: the same after the last step.
      expert_bias: after the last step, of a run that has one.
    """

    metrics: list[dict[str, float]]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    expert_bias: np.ndarray | None = None


@functools.cache
def model_components(model: str) -> Any:
    """The component tree of a model, before any swap."""
    return _patterned() if model == "pattern" else _CONFIGS[model].model.components()


@functools.cache
def _builder(case: Case) -> tuple[StepBuilder, Stacks]:
    config = case.config
    tree = model_components(case.model) if case.model == "pattern" else components(config)
    return step_builder(config, tree)


def _batch(case: Case) -> dict[str, np.ndarray]:
    arrays = picture_batch() if case.model.startswith("flux") else batch(case.microbatches)
    return in_mesh_order(arrays, case.mesh, case.config.model.batch_tensors(LENGTH))


@functools.cache
def picture_batch() -> dict[str, np.ndarray]:
    """Two pictures of 2x2 patches in each row, with texts of two and three tokens, and padding after either."""
    random = np.random.default_rng(0)
    image_ids, text_ids = np.repeat([1, 2, 0], [4, 4, 2]), np.repeat([1, 2, 0], [2, 3, 1])
    corners = np.array([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]])
    timestep = random.random((BATCH, 3))
    arrays = {
        "latents": random.standard_normal((BATCH, 10, _FLUX.in_channels)),
        "noise": random.standard_normal((BATCH, 10, _FLUX.in_channels)),
        "timestep": timestep[:, image_ids],
        "image_positions": np.broadcast_to(np.concatenate((corners, corners, corners[:2])), (BATCH, 10, 3)),
        "image_segment_ids": np.broadcast_to(image_ids, (BATCH, 10)),
        "text": random.standard_normal((BATCH, 6, _FLUX.text_dim)),
        "text_segment_ids": np.broadcast_to(text_ids, (BATCH, 6)),
        "pooled": random.standard_normal((BATCH, 2, _FLUX.pooled_dim)),
        "guidance": 1 + random.random((BATCH, 2)),
    }
    batch = {
        tensor.name: arrays[tensor.name][None].astype(tensor.dtype, order="C") for tensor in _FLUX.batch_tensors(LENGTH)
    }
    return {**batch, LEARNING_RATE: np.float32(1e-2)}


@functools.cache
def batch(microbatches: int = 1) -> dict[str, np.ndarray]:
    """Two documents in each row, and in some rows padding after them."""
    random = np.random.default_rng(0)
    index = np.arange(LENGTH)[None]
    cut, end = random.integers(3, 8, (BATCH, 1)), random.integers(10, LENGTH + 1, (BATCH, 1))
    tokens = random.integers(0, 100, (BATCH, LENGTH))
    segment_ids = np.where(index >= end, 0, np.where(index >= cut, 2, 1))
    arrays = {
        "tokens": tokens,
        "labels": np.where(segment_ids > 0, np.roll(tokens, -1, 1), -100),
        "positions": np.where(index >= cut, index - cut, index),
        "segment_ids": segment_ids,
    }
    parts = {name: array.astype(np.int32).reshape(microbatches, -1, LENGTH) for name, array in arrays.items()}
    return {**parts, LEARNING_RATE: np.float32(1e-2)}


@functools.cache
def initial_parameters(model: str) -> dict[str, np.ndarray]:
    built = model_components(model).build()
    plan = init_plan(built)
    if model.startswith("flux"):  # with modulations and head of 0 no block would do anything, nor have gradients
        plan = {name: Normal(0.1) if init == Zeros() else init for name, init in plan.items()}
    if model.startswith("muse_glimmer"):  # its last norm begins at 0, which would leave all else without gradients
        plan = dict.fromkeys(plan, Normal(0.1))
    return {
        name: np.array(sample(plan[name], 0, name, tuple(weight.shape), "float32"))
        for name, weight in built.named_parameters()
    }


def _state(
    case: Case, layouts: Mapping[str, Any], given: Mapping[str, np.ndarray] = types.MappingProxyType({})
) -> dict[str, np.ndarray]:
    _, stacks = _builder(case)
    by_layer = {**{f"{PARAMS}{name}": array for name, array in initial_parameters(case.model).items()}, **given}
    state = {name: np.zeros(layout.shape, str(layout.dtype).removeprefix("torch.")) for name, layout in layouts.items()}
    names = [name for name in layouts if name.startswith(PARAMS) or name in given]
    return {**state, **stacks.in_state(PER_PARAMETER).stacked(by_layer, names, np.stack)}


def captured(case: Case, *, evaluate: bool = False) -> StepGraph:
    """The step before its passes; on a mesh it has passed the SPMD check."""
    return _captured(case, evaluate)


@functools.cache
def _captured(case: Case, evaluate: bool) -> StepGraph:
    steps, _ = _builder(case)
    step = steps.eval_step if evaluate else steps.train_step
    shapes = {name: np.shape(array) for name, array in _batch(case).items() if not (evaluate and name == LEARNING_RATE)}
    state = eval_state_layouts(steps.parameters) if evaluate else train_state_layouts(steps.parameters, case.mesh)
    state |= expert_bias_layouts(steps.balance.bias_shape if steps.balance else None, case.mesh)
    layouts = state, batch_layouts(steps.batch, shapes, case.mesh)
    graph = capture(step, *layouts, case.mesh)
    if case.mesh.num_devices > 1:
        check_spmd(graph, capture(step, *layouts, case.mesh, rank=case.mesh.num_devices - 1))
    return graph


def graph_of(case: Case, *, evaluate: bool = False) -> StepGraph:
    """The step after the passes that the flags of `case` mean."""
    return _graph_of(case, evaluate)


@functools.cache
def _graph_of(case: Case, evaluate: bool) -> StepGraph:
    # All cases that the policy alone tells apart share a capture.
    before = dataclasses.replace(case, memory_policy="none", prefetch=1, reshard=True)
    return run_passes(captured(before, evaluate=evaluate), graph_passes(case.config))[0]


# The programs are run three times each: effort in generating machine code is wasted. It changes no pass over HLO.
_FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
}


@functools.cache
def compiled(case: Case, *, evaluate: bool = False) -> XlaExecutable | SplitExecutable:
    """The step as an XLA program, or as several."""
    graph = graph_of(case, evaluate=evaluate)
    if case.split:
        return compile_split(graph, jax.devices(), compiler_options=_FAST_COMPILE)
    return lower_xla(graph, jax.devices(), compiler_options=_FAST_COMPILE).compile()


@functools.cache
def run_xla(case: Case) -> Outcome:
    """Three training steps on one batch."""
    executable = compiled(case)
    graph = executable.graph
    abstract = abstract_arrays(graph.state, case.mesh, jax_mesh(case.mesh, jax.devices()))
    initial = _state(case, graph.state)
    return _run(
        case,
        executable,
        {name: jax.device_put(array, abstract[name].sharding) for name, array in initial.items()},
        executable.place(_batch(case)),
    )


@functools.cache
def run_torch(case: Case) -> Outcome:
    """The same by the torch executor, on one device."""
    graph = graph_of(case)
    initial = _state(case, graph.state)
    return _run(
        case,
        TorchExecutable(graph, lambda: None),
        {name: torch.from_numpy(np.array(array)) for name, array in initial.items()},
        {name: torch.from_numpy(np.array(array)) for name, array in _batch(case).items()},
    )


def _run(case: Case, executable: Any, state: dict[str, Any], arrays: dict[str, Any]) -> Outcome:
    metrics, moments = [], {}
    for _ in range(NUM_STEPS):
        state, values = executable(state, arrays)
        metrics.append({name: float(value) for name, value in values.items()})
        moments = moments or _by_layer(case, state, EXP_AVG)
    bias = _by_layer(case, state, EXPERT_BIAS).get("")
    return Outcome(metrics, moments, _by_layer(case, state, PARAMS), bias)


def _by_layer(case: Case, state: Mapping[str, Any], kind: str) -> dict[str, np.ndarray]:
    _, stacks = _builder(case)
    kept = {name: value for name, value in state.items() if name.startswith(kind)}
    arrays = {n: np.array(v.numpy() if isinstance(v, torch.Tensor) else v) for n, v in kept.items()}
    by_layer = stacks.in_state((kind,)).unstacked(arrays, lambda stack, turn: stack[turn])
    return {name.removeprefix(kind): array for name, array in by_layer.items()}


def evaluate_xla(case: Case, given: Mapping[str, np.ndarray] = types.MappingProxyType({})) -> dict[str, float]:
    """The metrics of the evaluation step, at the initial state but for what is given by name, layer by layer."""
    executable = compiled(case, evaluate=True)
    graph = executable.graph
    abstract = abstract_arrays(graph.state, case.mesh, jax_mesh(case.mesh, jax.devices()))
    initial = _state(case, graph.state, given)
    state = {name: jax.device_put(array, abstract[name].sharding) for name, array in initial.items()}
    return {name: float(v) for name, v in executable(state, executable.place(_batch(case)))[1].items()}


def assert_same(got: Outcome, expected: Outcome, tolerance: float) -> None:
    """Metrics of every step within a relative tolerance; gradients and parameters of each tensor's largest value."""
    for step, expected_step in zip(got.metrics, expected.metrics, strict=True):
        for name, value in expected_step.items():
            assert abs(step[name] - value) <= tolerance * abs(value), (name, step[name], value)
    for kind in ("gradients", "parameters"):
        arrays, expected_arrays = getattr(got, kind), getattr(expected, kind)
        assert arrays.keys() == expected_arrays.keys()
        for name, array in expected_arrays.items():
            largest = np.abs(array).max()
            assert largest > 0, name
            assert np.abs(arrays[name] - array).max() <= tolerance * largest, (kind, name)
