"""Memory policies: what the backward pass is given, and that results stay those of keeping everything."""

import dataclasses
import math
import operator

import pytest
import torch
import torch.fx

from titan.graph.ir.dialect import graphs_of, op_name
from titan.graph.ir.step_graph import StepGraph
from titan.graph.passes.activations import block_of
from titan.train.testing.case import FSDP, HSDP, Case
from titan.train.testing.executed import compiled, run_torch, run_xla
from titan.train.testing.graphs import graph_of
from titan.train.testing.models import BATCH, DIM, FFN_DIM, LENGTH, NUM_LAYERS
from titan.train.testing.outcome import assert_same

_RULES = "selective, layers.*.attention::matmul=recompute, layers.*.feed_forward=offload"
# Of a Llama layer: queries, keys, values, the output; gate and up; down, whose result no gradient needs.
_MATMULS, _NEEDED_MATMULS = 7, 6
_SCORES_AND_VALUES = 2
_INPUT = (BATCH, LENGTH, DIM)


def _count(graph: StepGraph, *names: str) -> int:
    return sum(op_name(node.target) in names for part in graphs_of(graph.module) for node in part.nodes)


def _matmuls(graph: StepGraph) -> int:
    return _count(graph, "aten.mm.default", "aten.bmm.default")


def _loops(graph: StepGraph) -> list[torch.fx.Node]:
    return graph.module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)


def _stacked(graph: StepGraph) -> list[tuple[int, ...]]:
    """Shapes of what the forward loops stack for the backward loops."""
    scans = [scan for scan in _loops(graph) if scan.meta["region"] != "backward"]
    return [tuple(value.shape) for scan in scans for value in scan.meta["val"][len(scan.args[1]) :]]


def _stacked_in_host_memory(graph: StepGraph) -> list[tuple[int, ...]]:
    found = []
    for scan in _loops(graph):
        body = operator.attrgetter(scan.args[0].target)(graph.module).graph
        for result, value in zip(body.output_node().args[0], scan.meta["val"], strict=True):
            if (
                result.target is torch.ops.ao.wait_tensor.default
                and result.args[0].target is torch.ops.ao.offload.default
            ):
                found.append(tuple(value.shape))
    return found


_NONE = Case("llama3")


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize(
    ("policy", "prefetch"),
    [
        ("full", 1),
        ("selective", 1),
        ("offload", 0),
        ("offload", 1),
        ("offload", 2),
        ("offload", NUM_LAYERS + 2),
        ("layers.*=recompute", 1),
        ("layers.**::matmul=offload", 2),
        (_RULES, 1),
    ],
)
def test_every_policy_gives_the_same_bits_in_pytorch(policy, prefetch, scan):
    # The same ops on the same values.
    expected = run_torch(Case("llama3", scan=scan))
    assert_same(run_torch(Case("llama3", scan=scan, memory_policy=policy, prefetch=prefetch)), expected, 0)


@pytest.mark.parametrize(
    "case",
    [
        Case("llama3", memory_policy="full"),
        Case("llama3", memory_policy=_RULES, prefetch=0),
        Case("llama3", memory_policy="offload", mesh=FSDP),
        Case("llama3", scan=True, memory_policy="selective"),
        Case("llama3", scan=True, memory_policy="offload", prefetch=0),
        Case("llama3", scan=True, memory_policy="offload", prefetch=2, mesh=FSDP),
        Case("llama3", scan=True, memory_policy=_RULES, prefetch=NUM_LAYERS + 2),
    ],
    ids=["full", "rules", "offload_fsdp2", "scan_selective", "scan_offload0", "scan_offload2_fsdp2", "scan_rules5"],
)
def test_policies_give_the_same_in_xla(case):
    # XLA fuses, and so rounds, differently what is made in another place.
    assert_same(run_xla(case), run_xla(_NONE), 1e-6)


@pytest.mark.parametrize("policy", ["offload", _RULES])
def test_policies_suit_patterns_and_experts(policy):
    for model in ("pattern", "qwen3_moe"):
        expected = run_torch(Case(model))
        for scan in (False, True):
            assert_same(run_torch(Case(model, scan=scan, memory_policy=policy, prefetch=2)), expected, 1e-6)


def test_full_makes_all_but_layer_inputs_again():
    again = NUM_LAYERS * (_NEEDED_MATMULS + _SCORES_AND_VALUES)
    assert _matmuls(graph_of(Case("llama3", memory_policy="full"))) - _matmuls(graph_of(_NONE)) == again
    scanned = graph_of(Case("llama3", scan=True, memory_policy="full"))
    without = graph_of(Case("llama3", scan=True))
    assert NUM_LAYERS * (_matmuls(scanned) - _matmuls(without)) == again
    assert _stacked(scanned) == [(NUM_LAYERS, *_INPUT)]


def test_selective_keeps_what_matmuls_give_and_makes_the_rest_again():
    selective, none = graph_of(Case("llama3", memory_policy="selective")), graph_of(_NONE)
    assert _matmuls(selective) == _matmuls(none)
    assert _count(selective, "aten.silu.default") - _count(none, "aten.silu.default") == NUM_LAYERS
    stacked = _stacked(graph_of(Case("llama3", scan=True, memory_policy="selective")))
    tokens = NUM_LAYERS * BATCH * LENGTH
    # Of a token: the input; queries, keys, values; scores, heads, the output of attention; gate, up.
    widths = [DIM, 32, 16, 16, 4 * LENGTH, 32, DIM, FFN_DIM, FFN_DIM]
    assert sorted(map(math.prod, stacked)) == sorted(tokens * width for width in widths)
    assert sum(map(math.prod, stacked)) < sum(map(math.prod, _stacked(graph_of(Case("llama3", scan=True))))) / 1.5


@pytest.mark.parametrize("prefetch", [0, 1, 2, NUM_LAYERS + 2])
def test_offload_moves_each_layer_input_once_there_and_back(prefetch):
    graph = graph_of(Case("llama3", memory_policy="offload", prefetch=prefetch))
    for target in (torch.ops.ao.offload.default, torch.ops.ao.reload.default):
        moved = graph.module.graph.find_nodes(op="call_function", target=target)
        assert [tuple(node.meta["val"].shape) for node in moved] == [_INPUT] * NUM_LAYERS
    scanned = graph_of(Case("llama3", scan=True, memory_policy="offload", prefetch=prefetch))
    assert _stacked(scanned) == _stacked_in_host_memory(scanned) == [(NUM_LAYERS, *_INPUT)]
    backward = next(scan for scan in _loops(scanned) if scan.meta["region"] == "backward")
    assert len(backward.args[1]) == 1 + min(prefetch, NUM_LAYERS - 1)  # the gradient, and what has been fetched


@pytest.mark.parametrize("prefetch", range(NUM_LAYERS))
def test_offloaded_values_are_fetched_as_many_layers_ahead_as_asked_for(prefetch):
    graph = graph_of(Case("llama3", memory_policy="offload", prefetch=prefetch))
    waits_for = []
    for reload in graph.module.graph.find_nodes(op="call_function", target=torch.ops.ao.reload.default):
        barrier = reload.args[0].args[0]
        _, gradient = barrier.args[0]
        assert (barrier.target, gradient.meta["region"]) == (torch.ops.titan.barrier.default, "backward")
        waits_for.append(block_of(gradient.meta["module_fqn"]))
    # A layer begins with the gradient that the one after it gives, and the last with that of what follows all layers.
    turns = [""] * (prefetch + 1) + [f"layers.{index}" for index in reversed(range(NUM_LAYERS))]
    assert waits_for == turns[:NUM_LAYERS]


def test_rules_change_a_policy_where_they_say():
    def matmuls_again(policy: str) -> int:
        return _matmuls(graph_of(Case("llama3", memory_policy=policy))) - _matmuls(graph_of(_NONE))

    attention = 4 + _SCORES_AND_VALUES
    assert matmuls_again("layers.1=recompute") == _NEEDED_MATMULS + _SCORES_AND_VALUES
    assert matmuls_again("full, layers.*.feed_forward=save") == NUM_LAYERS * attention
    assert matmuls_again("full, layers.0=save, layers.2.attention=save") == 2 + attention + 2
    graph = graph_of(Case("pattern", scan=True, memory_policy="layers.**::attention=offload"))
    # The narrow layers alone, of which there are two, have an op that is attention; it gives values and log-sum-exps.
    assert _stacked_in_host_memory(graph) == [(2, BATCH, 4, LENGTH, 8), (2, BATCH, LENGTH, 4)]


def test_parameters_of_layers_are_gathered_again_for_the_backward_pass_unless_told_not_to():
    def gathers(**changes) -> int:
        return _count(graph_of(Case("llama3", mesh=FSDP, **changes)), "_c10d_functional.all_gather_into_tensor.default")

    in_layers, outside = (_MATMULS + 2) * NUM_LAYERS, 3  # with two norms each; embedding, norm and head
    assert gathers() == 2 * in_layers + outside
    assert gathers(reshard=False) == in_layers + outside
    assert gathers(memory_policy="full") == 2 * in_layers + outside


def _dots(case: Case) -> int:
    return compiled(case).compiled.as_text().count(" dot(")


def test_recomputation_survives_the_compiler():
    # XLA:CPU lets barriers go once it has fused, and merges the dots whose fused operands are then equal still: those
    # of queries, keys and values. XLA:TPU merges nothing: see aot_memory_policy_test.
    again = _NEEDED_MATMULS - 3 + _SCORES_AND_VALUES
    assert _dots(Case("llama3", memory_policy="full")) - _dots(_NONE) >= NUM_LAYERS * again


def test_each_microbatch_has_its_own_backward_pass():
    for scan in (False, True):
        case = Case("llama3", scan=scan, memory_policy="offload", microbatches=2)
        assert _count(graph_of(case), "ao.offload.default") == 2 * (1 if scan else NUM_LAYERS)
        assert_same(run_torch(case), run_torch(_NONE), 2e-6)  # sums over two halves of the batch
    assert_same(run_xla(dataclasses.replace(case, mesh=HSDP)), run_xla(_NONE), 2e-6)
