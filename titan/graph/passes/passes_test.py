"""The passes: what each removes, what it must not, and that results stay the same bit for bit."""

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from titan.graph.capture.trace import StepFunction, capture
from titan.graph.ir.dialect import op_name
from titan.graph.ir.step_graph import StepGraph
from titan.graph.passes.common_subexpressions import common_subexpressions
from titan.graph.passes.dead_code import dead_code
from titan.graph.passes.no_ops import no_ops
from titan.graph.passes.pipeline import run_passes
from titan.graph.testing.steps import HSDP, ONE, all_reduce, capture_metric, capture_training, ops
from titan.parallel.layout import TensorLayout

aten = torch.ops.aten
PASSES = (no_ops, common_subexpressions, dead_code)


def _counts(graph: StepGraph) -> Counter[str]:
    return Counter(op_name(node.target) for node in ops(graph))


def _capture_many(function: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> StepGraph:
    """A step of one input [4, 4] and any number of metrics."""
    step = StepFunction(
        lambda state, batch: ({}, {str(i): value for i, value in enumerate(function(state["x"]))}), nn.Module()
    )
    return capture(lambda mesh: step, {"x": TensorLayout((4, 4), torch.float32)}, {}, ONE)


_X = torch.tensor([[0.0, -0.0, 1.5, -2.0], [torch.inf, -torch.inf, torch.nan, 1e-40], [3.0] * 4, [-1.0, 1.0, 2.0, 0.5]])


def _same(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    """Whether dtypes, strides and every bit agree: a NaN equals itself, and 0.0 is not -0.0."""
    return all(
        a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(first, second, strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# A program: from the values so far, ops that take one or two of them; all are [4, 4] and some not contiguous.
_UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.sin,
    torch.Tensor.detach,
    torch.clone,
    torch.t,
    lambda x: x.transpose(0, 1),
    lambda x: x.transpose(-2, -1),
    lambda x: x.reshape(16).view(2, 8).view(4, 4),
    lambda x: x.reshape(2, 8),
    lambda x: x.contiguous(),
    lambda x: x[0:4],
    lambda x: x[:, ::1],
    lambda x: x.expand(4, 4),
    lambda x: x[:1].expand(4, 4),
    lambda x: x.to(torch.bfloat16).to(torch.float32),
    lambda x: aten._to_copy(x, dtype=x.dtype),
    lambda x: x**1,
    lambda x: x**1.0,
    lambda x: x**2,
    lambda x: x + 0.0,
    lambda x: x * -0.0,
    lambda x: x * 0.0,
    lambda x: x * True,
    lambda x: x * 1,
    lambda x: x + torch.tensor(0.25),
    lambda x: x + torch.full((4, 4), 1).to(torch.float32),
    lambda x: x.split(2, 1)[1].repeat(1, 2),
)
_BINARY = (torch.add, torch.mul, torch.matmul, lambda x, y: torch.cat([x[:2], y[2:]]))

_PROGRAMS = st.lists(
    st.tuples(st.integers(0, len(_UNARY) + len(_BINARY) - 1), st.integers(0, 5), st.integers(0, 5)),
    min_size=1,
    max_size=14,
)


def _run_program(program: list[tuple[int, int, int]], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values = [x]
    for op, first, second in program:
        a, b = values[-1 - first % len(values)], values[-1 - second % len(values)]
        value = _UNARY[op](a) if op < len(_UNARY) else _BINARY[op - len(_UNARY)](a, b)
        values.append(value if value.shape == (4, 4) else value.reshape(4, 4))
    return tuple(values[-3:])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(program=_PROGRAMS)
def test_any_order_of_passes_leaves_results_bit_for_bit_and_ends(program) -> None:
    graph = _capture_many(lambda x: _run_program(program, x))
    expected = graph.module(_X)
    assert _same(expected, _run_program(program, _X))
    for order in itertools.permutations(PASSES):
        result, _ = run_passes(graph, order)
        assert _same(result.module(_X), expected)
        for step in order:
            once = step(result)
            assert step(once).text() == once.text(), f"{step.__name__} is not idempotent"


@pytest.mark.parametrize("mesh", [ONE, HSDP], ids=str)
def test_a_training_step_keeps_its_results_and_labels(mesh) -> None:
    graph = capture_training(mesh)
    result, reports = run_passes(graph, PASSES)
    assert result.num_ops < graph.num_ops and [report.name for report in reports] == [step.__name__ for step in PASSES]
    labels = {node.name: (node.meta["region"], node.meta["module_fqn"], node.meta["source"]) for node in ops(graph)}
    for node in ops(result):
        assert (node.meta["region"], node.meta["module_fqn"], node.meta["source"]) == labels[node.name]
        assert "val" in node.meta
    collectives = [{name: n for name, n in _counts(g).items() if "_c10d" in name} for g in (graph, result)]
    assert collectives[0] == collectives[1]
    if mesh is ONE:
        torch.manual_seed(0)
        inputs = [torch.randn(layout.shape) for layout in (*graph.state.values(), *graph.batch.values())]
        for ours, theirs in zip(result.module(*inputs), graph.module(*inputs), strict=True):
            assert torch.equal(ours, theirs)


def test_common_subexpressions_merges_what_is_the_same() -> None:
    graph = common_subexpressions(_capture_many(lambda x: (x.sin() + 1, x.sin() + 1, (x + 1).sin())))
    assert _counts(graph) == {"aten.sin.default": 2, "aten.add.Tensor": 2}
    first, second, _ = graph.module.graph.output_node().args[0]
    assert first is second and first.name == "add"


@pytest.mark.parametrize("numbers", [(1, 1.0), (1, True), (1.0, True), (0.0, -0.0), (0, False)])
def test_common_subexpressions_tells_numbers_apart(numbers: tuple[object, object]) -> None:
    graph = capture_metric(lambda x, _: torch.stack([x * number for number in (*numbers, *numbers)]))
    assert _counts(common_subexpressions(graph))["aten.mul.Tensor"] == 2


def test_common_subexpressions_leaves_collectives_and_random_ops() -> None:
    graph = capture_metric(lambda x, mesh: all_reduce(x, mesh, "dp_shard") + all_reduce(x, mesh, "dp_shard"), HSDP)
    assert _counts(common_subexpressions(graph)) == _counts(graph)
    graph = capture_metric(lambda x, _: x.sin() + x.sin())
    for node in graph.module.graph.find_nodes(op="call_function", target=aten.sin.default):
        node.target = aten.bernoulli.default
    assert _counts(common_subexpressions(graph))["aten.bernoulli.default"] == 2
    assert _counts(common_subexpressions(capture_metric(lambda x, _: x.cos() + x.cos())))["aten.cos.default"] == 1


def test_dead_code_removes_what_nobody_uses_and_keeps_inputs() -> None:
    def function(x: torch.Tensor, _) -> torch.Tensor:
        (x.sin() + torch.tensor(1.0)).exp()
        return torch.ones(3)

    graph = dead_code(capture_metric(function))
    assert [node.op for node in graph.module.graph.nodes] == ["placeholder", "call_function", "output"]
    assert torch.equal(graph.module(torch.ones(8, 8))[0], torch.ones(3))


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x.detach().clone().sin(), ["aten.sin.default"]),
        (lambda x: x.t().t().sin(), ["aten.sin.default"]),
        (lambda x: x.transpose(0, 1).transpose(0, 1).sin(), ["aten.sin.default"]),
        (lambda x: (x**1).sin(), ["aten.sin.default"]),
        (lambda x: x.view(16).view(2, 8).view(4, 4).sin(), ["aten.sin.default"]),
        (lambda x: x.view(16).view(2, 8).sin(), ["aten.view.default", "aten.sin.default"]),
        (lambda x: x[0:4].expand(4, 4).sin(), ["aten.sin.default"]),
        # These change strides, dtype or values, or are views of what is not contiguous.
        (
            lambda x: x.t().view(2, 2, 4).view(4, 4).sin(),
            ["aten.t.default", "aten.view.default", "aten.view.default", "aten.sin.default"],
        ),
        (lambda x: x.t().sin(), ["aten.t.default", "aten.sin.default"]),
        (lambda x: x.t().contiguous().sin(), ["aten.t.default", "aten.clone.default", "aten.sin.default"]),
        (lambda x: x[:1].expand(4, 4).sin(), ["aten.slice.Tensor", "aten.expand.default", "aten.sin.default"]),
        (lambda x: x.to(torch.bfloat16).sin(), ["aten._to_copy.default", "aten.sin.default"]),
        (lambda x: (x**2).sin(), ["aten.pow.Tensor_Scalar", "aten.sin.default"]),
    ],
)
def test_no_ops(function, left: list[str]) -> None:
    graph = _capture_many(lambda x: (function(x),))
    result = dead_code(no_ops(graph))
    assert [op_name(node.target) for node in ops(result)] == left
    assert _same(result.module(_X), graph.module(_X))


def test_no_ops_of_an_input_make_it_the_output() -> None:
    graph = no_ops(_capture_many(lambda x: (x.clone(), x.detach())))
    (x,) = graph.module.graph.find_nodes(op="placeholder")
    assert graph.module.graph.output_node().args[0] == (x, x)
