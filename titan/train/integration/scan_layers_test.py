"""The steps with layers as loops against the same without, for every model family and mesh."""

import pytest
import torch

from titan.graph.ir.dialect import graphs_of
from titan.train.testing.case import FSDP, HSDP, ONE, Case
from titan.train.testing.executed import evaluate_xla, run_torch, run_xla
from titan.train.testing.graphs import graph_of
from titan.train.testing.outcome import assert_same

# Of each value, and of a tensor's largest gradient: a few units in the last place of float32. The loop does the same
# arithmetic, but XLA fuses, and so rounds, a body on its own otherwise than within the whole step.
_TOLERANCE = 1e-6


@pytest.mark.parametrize(
    ("model", "mesh"),
    [("llama3", ONE), ("qwen3", FSDP), ("qwen3_moe", FSDP), ("pattern", ONE)],
    ids=["llama3", "qwen3_fsdp2", "moe_fsdp2", "pattern"],
)
def test_training_equals_that_without_loops(model, mesh):
    got, expected = (run_xla(Case(model, mesh=mesh, scan=scan)) for scan in (True, False))
    assert_same(got, expected, _TOLERANCE)
    assert expected.metrics[-1]["loss"] < expected.metrics[0]["loss"] - 1e-3


def test_microbatches_on_a_mesh_have_a_loop_each():
    case = Case("llama3", mesh=HSDP, microbatches=2, scan=True)
    # Sums over two halves of the batch and two replicas.
    assert_same(run_xla(case), run_xla(Case("llama3")), 2 * _TOLERANCE)
    assert len(graph_of(case).module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)) == 4


def test_in_bfloat16_training_equals_that_without_loops():
    got, expected = (run_torch(Case("llama3", gather_dtype="bfloat16", scan=scan)) for scan in (True, False))
    assert_same(got, expected, _TOLERANCE)
    # XLA:CPU leaves out roundings within a fusion; a tensor's gradients then differ by a few times bfloat16's 2^-8.
    assert_same(run_xla(Case("llama3", mesh=FSDP, gather_dtype="bfloat16", scan=True)), expected, 1.5e-2)


@pytest.mark.parametrize("model", ["llama3", "qwen3", "qwen3_moe", "pattern"])
def test_pytorch_runs_the_loops_too(model):
    assert_same(run_torch(Case(model, scan=True)), run_torch(Case(model)), _TOLERANCE)
    if model != "qwen3":
        assert_same(run_torch(Case(model, scan=True)), run_xla(Case(model, scan=True)), 2 * _TOLERANCE)


@pytest.mark.parametrize(("model", "mesh"), [("pattern", ONE), ("llama3", FSDP)], ids=["pattern", "llama3_fsdp2"])
def test_evaluation_equals_that_without_loops(model, mesh):
    got, expected = (evaluate_xla(Case(model, mesh=mesh, scan=scan)) for scan in (True, False))
    assert got["num_tokens"] == expected["num_tokens"]
    assert got["loss_sum"] == pytest.approx(expected["loss_sum"], rel=_TOLERANCE)
    graph = graph_of(Case(model, mesh=mesh, scan=True), evaluate=True)
    (*loops,) = graph.module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    # Nothing is stacked where there is no backward pass.
    assert [len(loop.meta["val"]) for loop in loops] == [1] * (2 if model == "pattern" else 1)


def test_a_step_is_as_large_for_any_number_of_layers():
    graphs = [graph_of(Case(model, scan=True, memory_policy="full")) for model in ("llama3", "llama3_deep")]
    sizes = [[len(part.nodes) for part in graphs_of(graph.module)] for graph in graphs]
    assert sizes[0] == sizes[1]
