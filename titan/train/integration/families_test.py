"""The model families in training: the step on devices as on one and by XLA as by PyTorch, weights of another family."""

import functools
import os

import numpy as np
import pytest
import torch

from titan.core.checkpoint import CheckpointConfig
from titan.core.config.validate import ConfigError
from titan.core.init import Normal, Zeros, init_plan, sample
from titan.graph.capture.spmd_check import check_spmd
from titan.graph.capture.trace import capture
from titan.graph.executors.torch import TorchExecutable
from titan.graph.ir.step_graph import StepGraph
from titan.graph.passes.pipeline import run_passes
from titan.models.family import ModelConfig
from titan.models.llama3.config import Llama3Config
from titan.models.muse_glimmer.config import MuseGlimmerConfig
from titan.models.qwen3.config import Qwen3Config, Qwen3MoeConfig
from titan.parallel.mesh import MeshSpec
from titan.parallel.simple_fsdp import ShardingPolicy
from titan.train.build import graph_passes
from titan.train.config.run import Config, OptimizerConfig
from titan.train.inputs.hf_weights import check_hf
from titan.train.step.builder import StepBuilder
from titan.train.step.state import EXP_AVG, LEARNING_RATE, PARAMS, batch_layouts, parameter_layouts, train_state_layouts

NUM_DEVICES = 4
os.environ.setdefault("NPROC", str(4 * NUM_DEVICES))  # see XlaRuntime

import jax  # noqa: E402 (after NPROC)

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)

from titan.graph.executors.xla import abstract_arrays, jax_mesh, lower_xla  # noqa: E402

# 6 experts and 3 are divided by 2 and by nothing, so that of the stacked weights either dim 0 or dim 1 is sharded.
_SIZES = {"vocab_size": 100, "dim": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
_MOE = {"num_active_experts": 2, "expert_ffn_dim": 24}
FAMILIES: dict[str, ModelConfig] = {
    "qwen3_tied": Qwen3Config(**_SIZES, ffn_dim=48, tie_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_MOE, num_experts=6),
    "qwen3_moe_odd": Qwen3MoeConfig(**_SIZES, **_MOE, num_experts=3),
    # The window is shorter than a document.
    "muse_glimmer": MuseGlimmerConfig(
        **{**_SIZES, "num_layers": 2}, ffn_dim=48, window=4, global_interval=2, logit_scale=3.0
    ),
}
ONE = MeshSpec((), ())
FSDP = MeshSpec(("dp_shard",), (2,))
HSDP = MeshSpec(("dp_replicate", "dp_shard"), (2, 2))
BATCH, LENGTH = 8, 16
TOLERANCE = 1e-5  # of the largest value: float32 sums in another order


def builder(family: str, mesh: MeshSpec) -> StepBuilder:
    build = FAMILIES[family].components().build
    policy = ShardingPolicy(reduce_dtype=torch.float32)
    return StepBuilder(
        build_model=build,
        batch=FAMILIES[family].batch_tensors(LENGTH),
        loss_module=FAMILIES[family].loss_module,
        parameters=parameter_layouts(build(), mesh, policy),
        policy=policy,
        optimizer=OptimizerConfig(),
        max_grad_norm=1.0,
        num_microbatches=1,
    )


@functools.cache
def batch() -> dict[str, np.ndarray]:
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
    return {**{name: array.astype(np.int32)[None] for name, array in arrays.items()}, LEARNING_RATE: np.float32(1e-2)}


@functools.cache
def initial_state(family: str) -> dict[str, np.ndarray]:
    steps = builder(family, ONE)
    plan = init_plan(steps.build_model())
    state = {}
    for name, layout in train_state_layouts(steps.parameters, ONE).items():
        fqn = name.removeprefix(PARAMS)
        state[name] = np.zeros(layout.shape, str(layout.dtype).removeprefix("torch."))
        if name.startswith(PARAMS):
            # A final norm that begins at zero would leave all other weights without a gradient; and where norms follow
            # sub-blocks, the first steps would turn weights of 0.02 around, each rounding with them.
            initializer = Normal(0.1) if Zeros() in plan.values() else plan[fqn]
            state[name] = np.array(sample(initializer, 0, fqn, layout.shape, "float32"))
    return state


def captured(family: str, mesh: MeshSpec) -> StepGraph:
    steps = builder(family, mesh)
    shapes = {name: np.shape(array) for name, array in batch().items()}
    layouts = train_state_layouts(steps.parameters, mesh), batch_layouts(steps.batch, shapes, mesh)
    graph = capture(steps.train_step, *layouts, mesh)
    if mesh.num_devices > 1:
        check_spmd(graph, capture(steps.train_step, *layouts, mesh, rank=mesh.num_devices - 1))
    return run_passes(graph, graph_passes(Config()))[0]


@functools.cache
def run_xla(family: str, mesh: MeshSpec) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """The metrics of three steps on one batch, and the first moments (a tenth of the clipped gradients) after one."""
    graph = captured(family, mesh)
    executable = lower_xla(graph, jax.devices()).compile()
    abstract = abstract_arrays(graph.state, mesh, jax_mesh(mesh, jax.devices()))
    state = {name: jax.device_put(array, abstract[name].sharding) for name, array in initial_state(family).items()}
    metrics, first = [], {}
    for _ in range(3):
        state, values = executable(state, executable.place(batch()))
        metrics.append({name: float(value) for name, value in values.items()})
        first = first or {name: np.asarray(array) for name, array in state.items() if name.startswith(EXP_AVG)}
    return metrics, first


def assert_same_step(got, expected) -> None:
    for step, expected_step in zip(got[0], expected[0], strict=True):
        for name, value in expected_step.items():
            assert abs(step[name] - value) <= TOLERANCE * abs(value), name
    for name, array in expected[1].items():
        assert np.abs(array).max() > 0, name
        assert np.abs(got[1][name] - array).max() <= TOLERANCE * np.abs(array).max(), name


@pytest.mark.parametrize(
    "family, mesh",
    [
        ("qwen3_tied", FSDP),
        ("qwen3_moe", HSDP),
        ("qwen3_moe_odd", FSDP),
        ("muse_glimmer", FSDP),
        ("muse_glimmer", HSDP),
    ],
    ids=["tied_fsdp2", "moe_hsdp4", "moe_odd_fsdp2", "muse_fsdp2", "muse_hsdp4"],
)
def test_a_mesh_equals_one_device(family, mesh):
    assert_same_step(run_xla(family, mesh), run_xla(family, ONE))


@pytest.mark.parametrize("family", FAMILIES)
def test_xla_equals_torch_and_the_loss_falls(family):
    executable = TorchExecutable(captured(family, ONE), lambda: None)
    state = {name: torch.from_numpy(array.copy()) for name, array in initial_state(family).items()}
    arrays = {name: torch.from_numpy(np.array(array)) for name, array in batch().items()}
    metrics, first = [], {}
    for _ in range(3):
        state, values = executable(state, arrays)
        metrics.append({name: float(value) for name, value in values.items()})
        first = first or {name: tensor.numpy().copy() for name, tensor in state.items() if name.startswith(EXP_AVG)}
    assert_same_step(run_xla(family, ONE), (metrics, first))
    assert metrics[2]["loss"] < metrics[0]["loss"] - 0.1


def saved(config: ModelConfig, folder) -> str:
    config.hf().save_hf(
        {n: torch.zeros(p.shape) for n, p in config.components().build().named_parameters()}, config, folder
    )
    return str(folder)


@pytest.mark.parametrize(
    "theirs, ours, message",
    [
        (
            "qwen3_tied",
            "qwen3_moe",
            "--checkpoint.load_hf: the weights in {} are those of a Qwen3Config, the model is a ",
        ),
        (
            "qwen3_moe",
            "qwen3_tied",
            "--checkpoint.load_hf: the weights in {} are those of a Qwen3MoeConfig, the model ",
        ),
        ("qwen3_moe", "qwen3_moe_odd", "--model.num_experts: 3 is not the 6 of the weights in {}; give --model.num_"),
        (
            "qwen3_moe",
            "llama3",
            "--checkpoint.load_hf: {}/config.json: model_type is 'qwen3_moe', a Llama 3 has 'llama'",
        ),
        ("llama3", "qwen3_moe", "--checkpoint.load_hf: {}/config.json: model_type is 'llama', a Qwen3 has 'qwen3' or "),
        ("llama3", "muse_glimmer", "--checkpoint.load_hf: {}/config.json: model_type is 'llama', a Muse Glimmer has "),
    ],
)
def test_weights_of_another_model_are_refused(theirs, ours, message, tmp_path):
    models = {**FAMILIES, "llama3": Llama3Config(**_SIZES, ffn_dim=48)}
    folder = saved(models[theirs], tmp_path)
    check_hf(Config(model=models[theirs], checkpoint=CheckpointConfig(load_hf=folder)))
    with pytest.raises(ConfigError) as error:
        check_hf(Config(model=models[ours], checkpoint=CheckpointConfig(load_hf=folder)))
    assert str(error.value).startswith(message.format(folder)) and "\n" not in str(error.value)
