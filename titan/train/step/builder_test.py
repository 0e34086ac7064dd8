"""The training step: every mesh against one device, the captured graph against eager, xla against torch.optim."""

import collections

import numpy as np
import pytest
import torch

from titan.core.data.packing import IGNORED_LABEL
from titan.graph.executors.torch import TorchExecutable
from titan.graph.ir.step_graph import StepGraph
from titan.parallel.mesh import MeshSpec
from titan.train.step.state import LEARNING_RATE, PARAMS
from titan.train.testing.batches import batch_of
from titan.train.testing.case import Case
from titan.train.testing.executed import NUM_STEPS, initial_state, run_xla
from titan.train.testing.graphs import assert_one_program, builder_of, captured, graph_of
from titan.train.testing.grid import grid
from titan.train.testing.outcome import assert_same

# Dims that an axis of 8 does not divide, so that on 8 devices some weights are sharded on dim 1 and some replicated.
MODEL = "llama3_uneven"
ONE = Case(MODEL)

# float32 sums in another order: a few units in the last place of the largest summand, 1e-6, with room for cancellation.
TOLERANCE = 1e-5

MESHES = {
    "ddp2": (2, 1), "ddp4": (4, 1), "ddp8": (8, 1),
    "fsdp2": (1, 2), "fsdp4": (1, 4), "fsdp8": (1, 8),
    "hsdp4": (2, 2), "hsdp8": (2, 4), "hsdp8_wide": (4, 2),
}  # fmt: skip


def case_of(mesh: str, **changes) -> Case:
    return Case(MODEL, MeshSpec(("dp_replicate", "dp_shard"), MESHES[mesh]).without_trivial_axes(), **changes)


# Eight devices have a row each, and nothing to make two parts of.
CASES = {mesh: case_of(mesh, max_grad_norm=0.0) for mesh in MESHES} | {
    f"{mesh}_microbatches": case_of(mesh, max_grad_norm=0.0, microbatches=2) for mesh in MESHES if "8" not in mesh
}
_IN_EVERY_RUN = ("ddp2_microbatches", "fsdp8", "hsdp8", "hsdp4_microbatches")


@pytest.mark.parametrize("case", grid(CASES, CASES.keys() - _IN_EVERY_RUN))
def test_mesh_equals_one_device(case: Case) -> None:
    # Without clipping: the first moment after one step is (1 - beta1) times the gradient.
    expected = run_xla(Case(MODEL, max_grad_norm=0.0))
    assert_same(run_xla(case), expected, TOLERANCE)
    num_labels = (batch_of(case)["labels"] != IGNORED_LABEL).sum()
    assert [metrics["num_tokens"] for metrics in run_xla(case).metrics] == [num_labels] * NUM_STEPS


@pytest.mark.parametrize("case", grid(CASES, CASES.keys() - {"hsdp4_microbatches"}))
def test_every_device_has_the_same_program(case: Case) -> None:
    assert_one_program(case)


@pytest.mark.parametrize("case", grid({mesh: case_of(mesh) for mesh in ("ddp2", "fsdp2", "hsdp4")}, ("ddp2", "fsdp2")))
def test_bfloat16_is_the_same_precision_on_one_device_and_on_many(case: Case) -> None:
    """Weights are used in `gather_dtype` also where there is nothing to gather; state and gradients stay float32."""
    one, many = (Case(MODEL, mesh, gather_dtype="bfloat16", max_grad_norm=0.0) for mesh in (ONE.mesh, case.mesh))
    products = matmul_dtypes(captured(one))
    assert set(products) == {torch.bfloat16}
    assert matmul_dtypes(captured(many)) == products
    expected, got = run_xla(one), run_xla(many)
    assert {array.dtype for array in expected.gradients.values()} == {np.dtype(np.float32)}
    for metrics, expected_metrics in zip(got.metrics, expected.metrics, strict=True):
        assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-4)
    for name, gradient in expected.gradients.items():
        # Each device rounds its part of a gradient to 8 bits, four units in the last place for four devices. One
        # device's own gradients are as far from float32's: 0.0116 of the largest where hsdp4 is 0.0106 from it.
        assert np.abs(got.gradients[name] - gradient).max() <= 2**-6 * np.abs(gradient).max(), name


def test_every_reduction_of_a_gradient_is_in_reduce_dtype() -> None:
    graph = captured(case_of("hsdp4", microbatches=2, reduce_dtype="bfloat16"))
    reduced = {
        (node.target._opname, node.meta["val"].dtype)
        for node in graph.module.graph.nodes
        if getattr(node.target, "_opname", "") in ("all_reduce", "reduce_scatter_tensor") and node.meta["val"].dim()
    }
    assert reduced == {("all_reduce", torch.bfloat16), ("reduce_scatter_tensor", torch.bfloat16)}


def matmul_dtypes(graph: StepGraph) -> list[torch.dtype]:
    nodes = graph.module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    return [node.meta["val"].dtype for node in nodes]


@pytest.mark.parametrize("mesh", grid({"fsdp8": "fsdp8", "hsdp8": "hsdp8"}, ("hsdp8",)))
def test_clipping_is_by_the_global_norm(mesh: str) -> None:
    clipped, free = run_xla(case_of(mesh, max_grad_norm=0.1)), run_xla(case_of(mesh, max_grad_norm=0.0))
    norm = free.metrics[0]["grad_norm"]
    assert clipped.metrics[0]["grad_norm"] == pytest.approx(norm, rel=TOLERANCE) and norm > 0.1
    for name, gradient in free.gradients.items():
        expected = gradient * (0.1 / (norm + 1e-6))
        assert np.abs(clipped.gradients[name] - expected).max() <= TOLERANCE * np.abs(expected).max(), name


def torch_state(graph: StepGraph) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in initial_state(ONE, graph.state).items()}


def torch_batch(case: Case) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(array) for name, array in batch_of(case).items()}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("with_passes", [False, True])
def test_interpreted_graph_is_bitwise_eager(microbatches: int, with_passes: bool) -> None:
    case = Case(MODEL, microbatches=microbatches)
    graph = graph_of(case) if with_passes else captured(case)
    interpreted = TorchExecutable(graph, lambda: None)
    eager = builder_of(case)[0].train_step(None)
    states = [torch_state(graph), torch_state(graph)]
    for step in range(NUM_STEPS):
        states[0], actual = interpreted(states[0], torch_batch(case))
        states[1], expected = eager.call(states[1], torch_batch(case))
        for key in (*expected, *states[1]):
            a, b = (actual[key], expected[key]) if key in expected else (states[0][key], states[1][key])
            assert torch.equal(a, b), (step, key)


def test_xla_equals_a_loop_with_torch_optim() -> None:
    """A loop with torch.optim.AdamW, clip_grad_norm_ and a mean cross-entropy."""
    got = run_xla(ONE)
    model = builder_of(ONE)[0].build_model().to_empty(device="cpu")
    state = torch_state(captured(ONE))
    model.load_state_dict({key.removeprefix(PARAMS): value for key, value in state.items() if PARAMS in key})
    batch = {name: tensor[0] for name, tensor in torch_batch(ONE).items() if name != LEARNING_RATE}
    config = ONE.config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        float(batch_of(ONE)[LEARNING_RATE]),
        (config.beta1, config.beta2),
        config.epsilon,
        config.weight_decay,
    )
    for metrics in got.metrics:
        logits = model(batch["tokens"], batch["positions"], batch["segment_ids"])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten().long(), ignore_index=IGNORED_LABEL
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ONE.max_grad_norm)
        optimizer.step()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=TOLERANCE)
    for name, weight in model.named_parameters():
        expected = weight.detach().numpy()
        assert np.abs(got.parameters[name] - expected).max() <= TOLERANCE * np.abs(expected).max(), name


def test_replicas_reduce_once_however_many_microbatches() -> None:
    """HSDP with microbatches: one reduce-scatter a microbatch and weight, but one all-reduce over replicas a weight."""
    case = case_of("hsdp4", max_grad_norm=0.0, microbatches=2)
    counts: collections.Counter = collections.Counter()
    for node in captured(case).module.graph.nodes:
        if getattr(node.target, "namespace", "") == "_c10d_functional" and node.meta["val"].dim():
            axis = next((argument for argument in node.args if argument in case.mesh.axis_names), None)
            counts[node.target._opname, axis] += 1
    parameters = builder_of(case)[0].parameters
    sharded = sum(any(p.is_shard() for p in layout.placements) for layout in parameters.values())
    assert 0 < sharded <= len(parameters)
    assert counts["all_reduce", "dp_replicate"] == len(parameters)
    assert counts["reduce_scatter_tensor", "dp_shard"] == 2 * sharded
    assert counts["all_gather_into_tensor", "dp_shard"] == 2 * sharded
