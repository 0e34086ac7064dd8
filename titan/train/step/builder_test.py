"""The training step: every mesh against one device, the captured graph against eager, xla against torch.optim."""

import dataclasses
import functools
import os

import numpy as np
import pytest
import torch

from titan.core.data.packing import IGNORED_LABEL
from titan.core.init import init_plan, sample
from titan.graph.capture.spmd_check import check_spmd
from titan.graph.capture.trace import capture
from titan.graph.executors.torch import TorchExecutable
from titan.graph.ir.step_graph import StepGraph
from titan.graph.passes.pipeline import run_passes
from titan.models.llama3.config import Llama3Config
from titan.parallel.mesh import MeshSpec
from titan.parallel.simple_fsdp import ShardingPolicy
from titan.train.build import graph_passes
from titan.train.config.run import Config, OptimizerConfig
from titan.train.step.builder import StepBuilder
from titan.train.step.state import (
    EXP_AVG,
    LEARNING_RATE,
    PARAMS,
    batch_layouts,
    parameter_layouts,
    train_state_layouts,
)

NUM_DEVICES = 8
os.environ.setdefault("NPROC", str(4 * NUM_DEVICES))  # see XlaRuntime

import jax  # noqa: E402 (after NPROC)

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)

from titan.graph.executors.xla import abstract_arrays, jax_mesh, lower_xla  # noqa: E402

# Dims that an axis of 8 does not divide: 36 and 100 are divided by 4 alone and 500 too, the norms' 36 by nothing else,
# so on 8 devices some weights are sharded on dim 1 and some are replicated.
MODEL = Llama3Config(
    vocab_size=500, dim=36, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=100, max_sequence_length=64
)
BATCH, LENGTH, STEPS = 16, 32, 3

# float32 sums in another order: a few units in the last place of the largest summand, 1e-6, with room for cancellation.
TOLERANCE = 1e-5

MESHES = {
    "ddp2": (2, 1), "ddp4": (4, 1), "ddp8": (8, 1),
    "fsdp2": (1, 2), "fsdp4": (1, 4), "fsdp8": (1, 8),
    "hsdp4": (2, 2), "hsdp8": (2, 4), "hsdp8_wide": (4, 2),
}  # fmt: skip


def mesh_of(name: str) -> MeshSpec:
    return MeshSpec(("dp_replicate", "dp_shard"), MESHES[name]).without_trivial_axes()


@functools.cache
def batches() -> tuple[dict[str, np.ndarray], ...]:
    """Packed rows with very different numbers of labels: some ranks have none at all, others all."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(STEPS):
        tokens = random.integers(0, MODEL.vocab_size, (BATCH, LENGTH), dtype=np.int32)
        cuts = random.integers(4, LENGTH - 4, (BATCH, 1))
        index = np.arange(LENGTH)[None]
        second = index >= cuts
        labels = np.roll(tokens, -1, 1)
        labels[:, -1] = IGNORED_LABEL
        labels[index == cuts - 1] = IGNORED_LABEL
        labels[:2] = IGNORED_LABEL
        labels[2:9][random.random((7, LENGTH)) < 0.7] = IGNORED_LABEL
        made.append(
            {
                "tokens": tokens,
                "labels": labels,
                "positions": np.where(second, index - cuts, index).astype(np.int32),
                "segment_ids": np.where(second, 2, 1).astype(np.int32),
            }
        )
    return tuple(made)


@functools.cache
def builder(
    mesh: MeshSpec, num_microbatches: int, max_grad_norm: float = 1.0, gather_dtype: torch.dtype | None = None
) -> StepBuilder:
    build = MODEL.components().build
    policy = ShardingPolicy(gather_dtype=gather_dtype, reduce_dtype=torch.float32)
    return StepBuilder(
        build_model=build,
        batch=MODEL.batch_tensors(LENGTH),
        loss_module=MODEL.loss_module,
        parameters=parameter_layouts(build(), mesh, policy),
        policy=policy,
        optimizer=OptimizerConfig(),
        max_grad_norm=max_grad_norm,
        num_microbatches=num_microbatches,
    )


def microbatches(batch: dict[str, np.ndarray], num: int, learning_rate: float = 1e-2) -> dict[str, np.ndarray]:
    shaped = {name: array.reshape(num, -1, LENGTH) for name, array in batch.items()}
    return {**shaped, LEARNING_RATE: np.float32(learning_rate)}


@functools.cache
def captured(
    mesh: MeshSpec, num_microbatches: int, max_grad_norm: float = 1.0, gather_dtype: torch.dtype | None = None
) -> StepGraph:
    steps = builder(mesh, num_microbatches, max_grad_norm, gather_dtype)
    shapes = {name: np.shape(array) for name, array in microbatches(batches()[0], num_microbatches).items()}
    layouts = train_state_layouts(steps.parameters, mesh), batch_layouts(steps.batch, shapes, mesh)
    graph = capture(steps.train_step, *layouts, mesh)
    if mesh.num_devices > 1:
        check_spmd(graph, capture(steps.train_step, *layouts, mesh, rank=mesh.num_devices - 1))
    return graph


@functools.cache
def initial_state() -> dict[str, np.ndarray]:
    steps = builder(MeshSpec((), ()), 1)
    plan = init_plan(steps.build_model())
    state = {}
    for name, layout in train_state_layouts(steps.parameters, MeshSpec((), ())).items():
        fqn = name.removeprefix(PARAMS)
        state[name] = np.zeros(layout.shape, str(layout.dtype).removeprefix("torch."))
        if name.startswith(PARAMS):
            state[name] = np.array(sample(plan[fqn], 0, fqn, layout.shape, "float32"))
    return state


@functools.cache
def run_xla(mesh: MeshSpec, num_microbatches: int, max_grad_norm: float = 1.0, gather_dtype: torch.dtype | None = None):
    """Losses, gradient norms, the first moments after step 1 and the state after the last step."""
    graph, _ = run_passes(captured(mesh, num_microbatches, max_grad_norm, gather_dtype), graph_passes(Config()))
    executable = lower_xla(graph, jax.devices()).compile()
    abstract = abstract_arrays(graph.state, mesh, jax_mesh(mesh, jax.devices()))
    state = {name: jax.device_put(array, abstract[name].sharding) for name, array in initial_state().items()}
    metrics, first = [], {}
    for batch in batches():
        state, values = executable(state, executable.place(microbatches(batch, num_microbatches)))
        metrics.append({name: float(value) for name, value in values.items()})
        first = first or {name: np.array(array) for name, array in state.items() if name.startswith(EXP_AVG)}
    return metrics, first, {name: np.array(array) for name, array in state.items()}


def assert_close(actual: np.ndarray, expected: np.ndarray, what: str, tolerance: float = TOLERANCE) -> None:
    assert np.isfinite(actual).all(), what
    scale = np.abs(expected).max()
    error = np.abs(actual - expected).max()
    assert error <= tolerance * scale, f"{what}: off by {error / scale:.1e} of the largest value"


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("name", MESHES)
def test_mesh_equals_one_device(name: str, num_microbatches: int) -> None:
    # Without clipping: the first moment after one step is (1 - beta1) times the gradient.
    metrics, gradients, state = run_xla(mesh_of(name), num_microbatches, 0.0)
    expected_metrics, expected_gradients, expected_state = run_xla(MeshSpec((), ()), 1, 0.0)
    for step, (actual, expected) in enumerate(zip(metrics, expected_metrics)):
        assert actual["num_tokens"] == expected["num_tokens"]
        for key in ("loss", "grad_norm"):
            assert actual[key] == pytest.approx(expected[key], rel=TOLERANCE), (key, step)
    for key, expected in expected_gradients.items():
        assert np.abs(expected).max() > 0, key
        assert_close(gradients[key], expected, key)
    for key, expected in expected_state.items():
        # Adam divides by the root of the second moment: where a gradient is nearly zero, rounding decides.
        assert_close(state[key], expected, key, 1e-3)


def test_bfloat16_is_the_same_precision_on_one_device_and_on_many() -> None:
    """Weights are used in `gather_dtype` also where there is nothing to gather; state and gradients stay float32."""
    one_device = MeshSpec((), ())
    expected, gradients, _ = run_xla(one_device, 1, 0.0, torch.bfloat16)
    products = matmul_dtypes(captured(one_device, 1, 0.0, torch.bfloat16))
    assert set(products) == {torch.bfloat16}
    assert {array.dtype for array in gradients.values()} == {np.dtype(np.float32)}
    for name in ("ddp2", "fsdp2", "hsdp4"):
        actual, actual_gradients, _ = run_xla(mesh_of(name), 1, 0.0, torch.bfloat16)
        assert matmul_dtypes(captured(mesh_of(name), 1, 0.0, torch.bfloat16)) == products
        for step in range(STEPS):
            assert actual[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-4), (name, step)
        for key, gradient in gradients.items():
            # Each device rounds its part of a gradient to 8 bits: two units in the last place.
            assert_close(actual_gradients[key], gradient, key, 2**-7)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_every_reduction_of_a_gradient_is_in_reduce_dtype(num_microbatches: int) -> None:
    mesh = mesh_of("hsdp4")
    steps = builder(mesh, num_microbatches)
    steps = dataclasses.replace(steps, policy=dataclasses.replace(steps.policy, reduce_dtype=torch.bfloat16))
    shapes = {name: np.shape(array) for name, array in microbatches(batches()[0], num_microbatches).items()}
    layouts = train_state_layouts(steps.parameters, mesh), batch_layouts(steps.batch, shapes, mesh)
    graph = capture(steps.train_step, *layouts, mesh)
    reduced = {
        (node.target._opname, node.meta["val"].dtype)
        for node in graph.module.graph.nodes
        if getattr(node.target, "_opname", "") in ("all_reduce", "reduce_scatter_tensor") and node.meta["val"].dim()
    }
    assert reduced == {("all_reduce", torch.bfloat16), ("reduce_scatter_tensor", torch.bfloat16)}


def matmul_dtypes(graph: StepGraph) -> list[torch.dtype]:
    nodes = graph.module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    return [node.meta["val"].dtype for node in nodes]


def test_clipping_is_by_the_global_norm() -> None:
    for name in ("fsdp8", "hsdp4"):
        clipped, gradients, _ = run_xla(mesh_of(name), 1, 0.1)
        free, free_gradients, _ = run_xla(mesh_of(name), 1, 0.0)
        norm = free[0]["grad_norm"]
        assert clipped[0]["grad_norm"] == pytest.approx(norm, rel=TOLERANCE) and norm > 0.1
        for key, expected in free_gradients.items():
            assert_close(gradients[key], expected * (0.1 / (norm + 1e-6)), key)


def torch_state() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in initial_state().items()}


def torch_batch(index: int, num_microbatches: int) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(array) for name, array in microbatches(batches()[index], num_microbatches).items()}


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("with_passes", [False, True])
def test_interpreted_graph_is_bitwise_eager(num_microbatches: int, with_passes: bool) -> None:
    one_device = MeshSpec((), ())
    graph = captured(one_device, num_microbatches)
    if with_passes:
        graph, _ = run_passes(graph, graph_passes(Config()))
    interpreted = TorchExecutable(graph, lambda: None)
    eager = builder(one_device, num_microbatches).train_step(None)
    states = [torch_state(), torch_state()]
    for index in range(STEPS):
        batch = torch_batch(index, num_microbatches)
        states[0], actual = interpreted(states[0], batch)
        states[1], expected = eager.call(states[1], batch)
        for key in (*expected, *states[1]):
            a, b = (actual[key], expected[key]) if key in expected else (states[0][key], states[1][key])
            assert torch.equal(a, b), (index, key)


def test_xla_follows_torch_and_both_follow_torch_optim() -> None:
    """xla against a loop with torch.optim.AdamW, clip_grad_norm_ and a mean cross-entropy."""
    metrics, _, state = run_xla(MeshSpec((), ()), 1)
    model = builder(MeshSpec((), ()), 1).build_model().to_empty(device="cpu")
    model.load_state_dict({key.removeprefix(PARAMS): value for key, value in torch_state().items() if PARAMS in key})
    config = OptimizerConfig()
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-2, (config.beta1, config.beta2), config.epsilon, config.weight_decay
    )
    for index in range(STEPS):
        batch = {name: tensor[0] for name, tensor in torch_batch(index, 1).items() if name != LEARNING_RATE}
        logits = model(batch["tokens"], batch["positions"], batch["segment_ids"])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten().long(), ignore_index=IGNORED_LABEL
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert metrics[index]["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
        assert metrics[index]["grad_norm"] == pytest.approx(norm.item(), rel=TOLERANCE)
    for name, weight in model.named_parameters():
        assert_close(state[f"{PARAMS}{name}"], weight.detach().numpy(), name, 1e-3)


def test_replicas_reduce_once_however_many_microbatches() -> None:
    """HSDP with microbatches: one reduce-scatter a microbatch and weight, but one all-reduce over replicas a weight."""
    mesh = mesh_of("hsdp8")
    graph = captured(mesh, 2)
    counts: dict[tuple[str, str], int] = {}
    for node in graph.module.graph.nodes:
        if getattr(node.target, "namespace", "") == "_c10d_functional" and node.meta["val"].dim():
            axis = next((argument for argument in node.args if argument in mesh.axis_names), None)
            counts[node.target._opname, axis] = counts.get((node.target._opname, axis), 0) + 1
    parameters = builder(mesh, 2).parameters
    sharded = sum(any(p.is_shard() for p in layout.placements) for layout in parameters.values())
    assert 0 < sharded <= len(parameters)
    assert counts["all_reduce", "dp_replicate"] == len(parameters)
    assert counts["reduce_scatter_tensor", "dp_shard"] == 2 * sharded
    assert counts["all_gather_into_tensor", "dp_shard"] == 2 * sharded
