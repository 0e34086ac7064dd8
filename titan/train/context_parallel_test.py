"""Sequences split over devices: the step equals that of one device, for every family and kind of attention."""

import dataclasses
import functools
import os
from typing import Any

import numpy as np
import pytest
import torch

from titan.core.config.validate import ConfigError
from titan.core.init import Normal, init_plan, sample
from titan.graph.capture import capture
from titan.graph.dialect import graphs_of
from titan.graph.executors.torch import place_local
from titan.graph.passes.pipeline import run_passes
from titan.graph.spmd_check import check_spmd
from titan.graph.step_graph import StepGraph
from titan.models.family import ModelConfig
from titan.models.flux.config import FluxConfig
from titan.models.llama3.config import Llama3Config
from titan.models.muse_glimmer.config import MuseGlimmerConfig
from titan.models.qwen3.config import Qwen3Config, Qwen3MoeConfig
from titan.parallel.mesh import MeshSpec
from titan.train.build import components, graph_passes, with_loops
from titan.train.compile_config import CompileConfig, TpuConfig
from titan.train.config import Config, OptimizerConfig, TrainingConfig
from titan.train.mesh_axes import data_share, mesh_spec, sharding_policy
from titan.train.model_split import model_split
from titan.train.parallelism_checks import check_context_parallel
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
from titan.train.token_order import in_mesh_order

NUM_DEVICES = 8
os.environ.setdefault("NPROC", str(4 * NUM_DEVICES))  # see XlaRuntime

import jax  # noqa: E402 (after NPROC)

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)

from titan.graph.executors.xla import abstract_arrays, jax_mesh, lower_xla, sharding  # noqa: E402

_SIZES = {"vocab_size": 100, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
FAMILIES: dict[str, ModelConfig] = {
    "llama3": Llama3Config(**_SIZES, ffn_dim=48),
    "qwen3_tied": Qwen3Config(**_SIZES, ffn_dim=48, tie_embeddings=True, attention="sdpa"),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, num_experts=6, num_active_experts=2, expert_ffn_dim=24),
    # The window is longer than a chunk and shorter than a document; the second layer has none.
    "muse_glimmer": MuseGlimmerConfig(**_SIZES, ffn_dim=48, window=5, global_interval=2, logit_scale=3.0),
}
ROWS, LENGTH = 8, 32
TOLERANCE = 1e-5  # of the largest value: float32 sums in another order
KERNELS = {
    "splash_attention_kernel": SplashAttentionKernelConfig(use_splash_attention_kernel=True, implementation="xla"),
    "fused_linear_cross_entropy": FusedLinearCrossEntropyConfig(enable=True, implementation="xla"),
    "rope_kernel": RopeKernelConfig(enable=True, implementation="xla"),
}
_FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


@dataclasses.dataclass(frozen=True)
class Case:
    """One form of a family's step; the attributes are flags, kernels those of `KERNELS`."""

    family: str
    cp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    tp: int = 1
    kernels: bool = False
    scan: bool = False
    memory_policy: str = "none"
    microbatches: int = 1

    @property
    def config(self) -> Config:
        return Config(
            model=FAMILIES[self.family],
            training=TrainingConfig(sequence_length=LENGTH, batch_size=ROWS),
            parallelism=ParallelismConfig(
                num_devices=self.cp * self.dp_shard * self.dp_replicate * self.tp,
                context_parallel=self.cp,
                tensor_parallel=self.tp,
                data_parallel_shard=self.dp_shard,
                data_parallel_replicate=self.dp_replicate,
            ),
            # So large an epsilon that an update follows its gradient and not the gradient's sign.
            optimizer=OptimizerConfig(epsilon=1e-2),
            tpu_config=TpuConfig(use_scan_layers=self.scan),
            compile=CompileConfig(memory_policy=self.memory_policy),
            **(KERNELS if self.kernels else {}),
        )

    @property
    def mesh(self) -> MeshSpec:
        return mesh_spec(self.config.parallelism)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Metrics of each step; by parameter a tenth of its clipped gradient in the first, and its value after the last."""

    metrics: list[dict[str, float]]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]


@functools.cache
def batch() -> dict[str, np.ndarray]:
    """Documents that begin and end within chunks, at other places in each row, and padding at the end of some rows."""
    random = np.random.default_rng(0)
    index = np.arange(LENGTH)[None]
    cut, end = random.integers(5, 20, (ROWS, 1)), random.integers(24, LENGTH + 1, (ROWS, 1))
    tokens = random.integers(0, 100, (ROWS, LENGTH))
    segment_ids = np.where(index >= end, 0, np.where(index >= cut, 2, 1))
    arrays = {
        "tokens": tokens,
        "labels": np.where(segment_ids > 0, np.roll(tokens, -1, 1), -100),
        "positions": np.where(index >= cut, index - cut, index),
        "segment_ids": segment_ids,
    }
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def placed(case: Case) -> dict[str, np.ndarray]:
    parts = {name: array.reshape(case.microbatches, -1, LENGTH) for name, array in batch().items()}
    return {**in_mesh_order(parts, case.mesh), LEARNING_RATE: np.float32(1e-2)}


@functools.cache
def builder(case: Case) -> tuple[StepBuilder, Stacks]:
    build = with_loops(components(case.config), case.config.tpu_config).build
    model, policy = build(), sharding_policy(case.config.parallelism)
    stacks = Stacks(stacked_parameters(model))
    split = model_split(case.config, model)
    layouts = parameter_layouts(model, case.mesh, policy, stacks, split.plans)
    steps = StepBuilder(
        build_model=build,
        batch=case.config.model.batch_tensors(LENGTH),
        loss_module=case.config.model.loss_module,
        parameters=layouts,
        policy=policy,
        optimizer=case.config.optimizer,
        max_grad_norm=1.0,
        num_microbatches=case.microbatches,
        plans=split.plans,
        borders=split.borders,
    )
    return steps, stacks


@functools.cache
def initial_parameters(family: str) -> dict[str, np.ndarray]:
    model = FAMILIES[family].components().build()
    plan = init_plan(model)
    # Muse Glimmer's last norm begins at zero, and would leave all other weights without a gradient.
    initializers = {name: Normal(0.1) if family == "muse_glimmer" else plan[name] for name in plan}
    return {
        name: np.array(sample(initializers[name], 0, name, tuple(weight.shape), "float32"))
        for name, weight in model.named_parameters()
    }


def graph_of(case: Case, *, evaluate: bool = False) -> StepGraph:
    """After the SPMD check and the passes."""
    steps, _ = builder(case)
    shapes = {n: np.shape(a) for n, a in placed(case).items() if not (evaluate and n == LEARNING_RATE)}
    state = eval_state_layouts(steps.parameters) if evaluate else train_state_layouts(steps.parameters, case.mesh)
    make_step = steps.eval_step if evaluate else steps.train_step
    layouts = state, batch_layouts(steps.batch, shapes, case.mesh)
    graph = capture(make_step, *layouts, case.mesh)
    if case.mesh.num_devices > 1:
        check_spmd(graph, capture(make_step, *layouts, case.mesh, rank=case.mesh.num_devices - 1))
    return run_passes(graph, graph_passes(case.config))[0]


def start(case: Case, graph: StepGraph) -> dict[str, Any]:
    _, stacks = builder(case)
    by_layer = {f"{PARAMS}{name}": array for name, array in initial_parameters(case.family).items()}
    names = [name for name in graph.state if name.startswith(PARAMS)]
    whole = stacks.in_state(PER_PARAMETER).stacked(by_layer, names, np.stack)
    abstract = abstract_arrays(graph.state, case.mesh, jax_mesh(case.mesh, jax.devices()))
    return {
        name: jax.device_put(whole.get(name, np.zeros(array.shape, array.dtype)), array.sharding)
        for name, array in abstract.items()
    }


@functools.cache
def run(case: Case) -> Outcome:
    """Two steps on one batch by the xla executor."""
    graph = graph_of(case)
    executable = lower_xla(graph, jax.devices(), compiler_options=_FAST_COMPILE).compile()
    state, arrays = start(case, graph), executable.place(placed(case))
    metrics, gradients = [], {}
    for _ in range(2):
        state, values = executable(state, arrays)
        metrics.append({name: float(value) for name, value in values.items()})
        gradients = gradients or _by_layer(case, state, EXP_AVG)
    return Outcome(metrics, gradients, _by_layer(case, state, PARAMS))


def _by_layer(case: Case, state: dict[str, Any], kind: str) -> dict[str, np.ndarray]:
    stacks = builder(case)[1].in_state((kind,))
    arrays = {name: np.asarray(array) for name, array in state.items() if name.startswith(kind)}
    return stacks.unstacked(arrays, lambda stack, turn: stack[turn])


def assert_same(got: Outcome, expected: Outcome) -> None:
    for step, expected_step in zip(got.metrics, expected.metrics, strict=True):
        for name, value in expected_step.items():
            assert abs(step[name] - value) <= TOLERANCE * abs(value), (name, step[name], value)
    for kind in ("gradients", "parameters"):
        arrays, expected_arrays = getattr(got, kind), getattr(expected, kind)
        assert arrays.keys() == expected_arrays.keys()
        for name, array in expected_arrays.items():
            largest = np.abs(array).max()
            assert largest > 0, name
            assert np.abs(arrays[name] - array).max() <= TOLERANCE * largest, (kind, name)


@pytest.mark.parametrize(
    "case",
    (
        Case("llama3", cp=4),
        Case("llama3", cp=4, dp_shard=2, scan=True, memory_policy="selective", kernels=True),
        Case("llama3", cp=2, dp_shard=2, dp_replicate=2, microbatches=2),
        Case("llama3", cp=2, dp_shard=2, tp=2, kernels=True),
        Case("qwen3_tied", cp=2, dp_shard=2),
        Case("qwen3_moe", cp=2, dp_shard=2),
        Case("muse_glimmer", cp=4, dp_shard=2),
        Case("muse_glimmer", cp=2, dp_shard=2, kernels=True),
    ),
    ids=lambda case: f"{case.family}_cp{case.cp}_fsdp{case.dp_shard}_tp{case.tp}{'_kernels' if case.kernels else ''}",
)
def test_split_sequences_equal_one_device(case):
    assert_same(run(case), run(Case(case.family)))


@pytest.mark.parametrize("scan", (False, True), ids=("layers", "scan"))
@pytest.mark.parametrize("memory_policy", ("full", "selective,layers.*.feed_forward=save"))
def test_gathered_keys_and_values_are_gathered_again_for_the_backward(memory_policy, scan):
    case = Case("llama3", cp=4, kernels=True, scan=scan, memory_policy=memory_policy)
    kept = _kept(graph_of(case).module)
    assert kept  # layers' inputs at least
    assert [value for value in kept if value.meta["val"].numel() >= _NUM_GATHERED] == []


# Elements of the keys of all tokens of all rows, of which no other value of a layer has so many.
_NUM_GATHERED = ROWS * _SIZES["num_kv_heads"] * LENGTH * _SIZES["head_dim"]


def _kept(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """What layers compute in the forward pass, or one turn of a loop over them does, and the backward pass reads."""
    graph = module.graph
    loops = [node for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)]
    if loops:
        body = getattr(module, loops[0].args[0].target).graph
        return list(body.output_node().args[0][len(loops[0].args[1]) :])
    made = [
        node for node in graph.nodes if node.meta.get("region") == "forward" and "layers" in node.meta["module_fqn"]
    ]
    return [node for node in made if any(user.meta.get("region") == "backward" for user in node.users)]


def test_with_the_splash_kernel_no_mask_of_queries_and_keys_is_made():
    module = graph_of(Case("muse_glimmer", cp=4, kernels=True, scan=True)).module
    shapes = {tuple(node.meta["val"].shape) for part in graphs_of(module) for node in part.nodes if _is_bool(node)}
    assert shapes  # labels that count, for one
    assert [shape for shape in shapes if shape[-2:] == (LENGTH // 4, LENGTH)] == []


def _is_bool(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def test_validation_equals_one_device():
    sums = []
    for case in (Case("muse_glimmer"), Case("muse_glimmer", cp=4, dp_shard=2)):
        graph = graph_of(case, evaluate=True)
        executable = lower_xla(graph, jax.devices(), compiler_options=_FAST_COMPILE).compile()
        _, metrics = executable(start(case, graph), executable.place(placed(case)))
        sums.append({name: float(value) for name, value in metrics.items()})
    one, split = sums
    assert split["num_tokens"] == one["num_tokens"] == (batch()["labels"] != -100).sum()
    assert abs(split["loss_sum"] - one["loss_sum"]) <= TOLERANCE * one["loss_sum"]


def test_each_device_has_the_same_number_of_keys_to_see():
    """With equal chunks in the order of the sequence, the last device would have seven times the first one's work."""
    ids = np.ones((1, 1, LENGTH), np.int32)
    index = in_mesh_order({"index": np.arange(LENGTH)[None, None], "ids": ids}, MeshSpec(("cp",), (4,)))["index"]
    seen = (index[0, 0].reshape(4, -1) + 1).sum(axis=1)
    assert len(set(seen)) == 1


def test_tokens_keep_their_labels_positions_and_documents():
    whole = {name: array[None] for name, array in batch().items()}
    mesh = MeshSpec(("dp_shard", "cp"), (2, 4))
    moved = in_mesh_order({**whole, LEARNING_RATE: np.float32(1)}, mesh)
    assert moved.pop(LEARNING_RATE) == 1
    for row in range(ROWS):
        before, after = (sorted(zip(*(arrays[name][0, row].tolist() for name in whole))) for arrays in (whole, moved))
        assert before == after
    assert not np.array_equal(moved["tokens"], whole["tokens"])


def test_a_model_without_causal_attention_is_refused():
    with pytest.raises(ConfigError) as error:
        check_context_parallel(dataclasses.replace(Case("llama3", cp=4).config, model=FluxConfig()))
    assert str(error.value) == (
        "--parallelism.context_parallel: it splits causal attention over tokens, of which a Flux has none; "
        "leave it at 1"
    )


def test_each_rank_of_the_torch_executor_has_the_part_that_xla_places_on_its_device():
    mesh = MeshSpec(("dp_shard", "cp"), (2, 4))
    whole = {name: array[None] for name, array in batch().items()}
    tensors = FAMILIES["llama3"].batch_tensors(LENGTH)
    layouts = batch_layouts(tensors, {name: array.shape for name, array in whole.items()}, mesh)
    devices = jax_mesh(mesh, jax.devices())
    for name, layout in layouts.items():
        placed_by_xla = jax.device_put(whole[name], sharding(layout, mesh, devices))
        shards = {shard.device: np.asarray(shard.data) for shard in placed_by_xla.addressable_shards}
        for rank, device in enumerate(devices.devices.flat):
            share, num_shares = data_share(mesh, range(mesh.num_devices), rank)
            rows = {name: np.split(array, num_shares, axis=1)[share] for name, array in whole.items()}
            np.testing.assert_array_equal(place_local(rows, layouts, mesh, rank)[name], shards[device])


@pytest.mark.parametrize(
    "length, kernel, message",
    (
        (
            36,
            {},
            "--training.sequence_length: 36 tokens cannot be split into two chunks for each of context_parallel=4 "
            "devices; give a multiple of 8, e.g. 40",
        ),
        (
            32,
            {"use_splash_attention_kernel": True, "implementation": "tokamax"},
            "--splash_attention_kernel.implementation: tokamax's kernel takes whole sequences, which context_parallel "
            "splits; give auto, jax or xla",
        ),
    ),
)
def test_what_cannot_be_split_is_refused(length, kernel, message):
    config = dataclasses.replace(
        Case("llama3", cp=4).config,
        training=TrainingConfig(sequence_length=length, batch_size=ROWS),
        splash_attention_kernel=SplashAttentionKernelConfig(**kernel),
    )
    with pytest.raises(ConfigError) as error:
        check_context_parallel(config)
    assert str(error.value) == message
