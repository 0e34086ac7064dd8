"""Loops over layers: gradients as autograd gives them, labels as without a loop, and what cannot be a loop."""

import operator

import pytest
import torch
from torch import nn

from titan.graph.capture.scan_layers import scan_layers
from titan.graph.capture.trace import StepFunction, capture
from titan.graph.executors.torch import TorchExecutable
from titan.graph.ir.step_graph import StepGraph
from titan.graph.passes.common_subexpressions import common_subexpressions
from titan.graph.passes.dead_code import dead_code
from titan.graph.passes.memory_policy import memory_policy_pass
from titan.graph.passes.memory_rules import POLICIES, parse_memory_policy
from titan.graph.passes.no_ops import no_ops
from titan.graph.passes.pipeline import run_passes
from titan.graph.testing.steps import ONE
from titan.parallel.layout import TensorLayout

_MATMUL = torch.ops.aten.mm.default
_SHAPES = {"x": (4, 6), "w": (3, 6, 6), "scale": (3, 6), "shared": (4, 1)}


class _Layer(nn.Module):
    def forward(self, x: torch.Tensor, count: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, shared: torch.Tensor):
        """The gradient of `w` comes out transposed."""
        return (w @ x.t()).t().tanh() * scale + x * shared.sin(), count + 1


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"*": _Layer()})

    def forward(self, x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, shared: torch.Tensor):
        """Two values are carried, one of them an integer."""
        return scan_layers(
            lambda carry, weights, shared: self.layers["*"](*carry, weights["w"], weights["scale"], *shared),
            (x, torch.zeros((), dtype=torch.int64)),
            {"w": w, "scale": scale},
            (shared,),
        )


def _step(state: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in state.items()}
    y, count = model(**leaves)
    grads = torch.autograd.grad((y * y).sum(), list(leaves.values()))
    return {**{f"grad_{name}": grad for name, grad in zip(leaves, grads, strict=True)}, "y": y.detach(), "count": count}


def _captured() -> StepGraph:
    model = _Model()
    layouts = {name: TensorLayout(shape, torch.float32) for name, shape in _SHAPES.items()}
    return capture(lambda mesh: StepFunction(lambda s, b: ({}, _step(s, model)), model), layouts, {}, ONE)


@pytest.mark.parametrize("policy", [None, *POLICIES, "layers.*::matmul=offload"])
def test_gradients_are_those_of_the_layers_one_after_the_other(policy: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=generator) for name, shape in _SHAPES.items()}
    expected = _step(state, _Model())  # outside of a capture: autograd of a plain loop
    graph = _captured()
    if policy is not None:
        step = memory_policy_pass(parse_memory_policy(policy), reshard=True, prefetch=1)
        graph, _ = run_passes(graph, (no_ops, common_subexpressions, dead_code, step))
    assert set(graph.metrics) == set(expected)
    with torch.no_grad():
        results = TorchExecutable(graph, lambda: None)(state, {})[1]
    assert results["count"] == expected["count"] == 3
    for name, tensor in expected.items():
        # Sums over layers in the same order; a product of matrices may be blocked otherwise.
        torch.testing.assert_close(results[name], tensor, rtol=1e-6, atol=1e-6)


def test_ops_of_a_loop_are_labelled_as_others_are() -> None:
    graph = _captured()
    forward, backward = graph.module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    assert (forward.meta["region"], backward.meta["region"]) == ("forward", "backward")
    assert forward.meta["loop"] == backward.meta["loop"]
    bodies = [operator.attrgetter(scan.args[0].target)(graph.module).graph for scan in (forward, backward)]
    for body in bodies:
        labels = {(node.meta["region"], node.meta["module_fqn"]) for node in body.nodes if node.target is _MATMUL}
        assert labels <= {("forward", "layers.*"), ("backward", "layers.*")}
        assert all(node.meta["source"].startswith(f"{__file__}:") for node in body.nodes if node.op == "call_function")
    regions = [{node.meta["region"] for node in body.nodes if node.op == "call_function"} for body in bodies]
    assert regions == [{"forward"}, {"forward", "backward"}]
    # Forward ops have one name in both bodies, by which a memory policy finds them.
    names = [
        {
            node.meta["turn_op"]: node.target
            for node in body.nodes
            if "turn_op" in node.meta and node.op != "placeholder"
        }
        for body in bodies
    ]
    assert {torch.ops.aten.tanh.default, _MATMUL} <= set(names[0].values())
    assert all(names[0][name] is target for name, target in names[1].items() if name in names[0])
    named = [node for node in bodies[1].nodes if node.op == "call_function" and "turn_op" in node.meta]
    before = {*bodies[1].find_nodes(op="placeholder")[2:], *named}  # not: the carry's gradient, shared's so far
    assert all(used in before for node in named for used in node.all_input_nodes)


def test_nothing_is_stacked_without_gradients() -> None:
    model = _Model()
    layouts = {name: TensorLayout(shape, torch.float32) for name, shape in _SHAPES.items()}

    def call(state, batch):
        return {}, dict(zip(("y", "count"), model(**state), strict=True))

    graph = capture(lambda mesh: StepFunction(call, model), layouts, {}, ONE)
    (scan,) = graph.module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    assert len(scan.meta["val"]) == 2 and "loop" not in scan.meta


@pytest.mark.parametrize(
    ("body", "stacks", "message"),
    [
        (lambda carry, weights, shared: carry, {}, r"need stacks of one length, not \[\]"),
        (
            lambda carry, weights, shared: carry,
            {"a": torch.zeros(3, 1), "b": torch.zeros(2, 1)},
            r"need stacks of one length, not \[2, 3\]",
        ),
        (
            lambda carry, weights, shared: (carry[0].sum(0),),
            {"a": torch.zeros(3, 1)},
            r"turned torch.float32\[4, 6\] into torch.float32\[6\]; what goes around a loop keeps its form",
        ),
        (
            lambda carry, weights, shared: (carry[0].bfloat16(),),
            {"a": torch.zeros(3, 1)},
            r"turned torch.float32\[4, 6\] into torch.bfloat16\[4, 6\]",
        ),
    ],
    ids=["no_stacks", "lengths", "shape", "dtype"],
)
def test_what_is_no_loop_is_refused(body, stacks, message: str) -> None:
    def call(state, batch):
        made = {name: state["x"].new_zeros(stack.shape) for name, stack in stacks.items()}
        return {}, {"y": scan_layers(body, (state["x"],), made, ())[0]}

    with pytest.raises(ValueError, match=message):
        capture(
            lambda mesh: StepFunction(call, nn.Module()), {"x": TensorLayout((4, 6), torch.float32)}, {}, ONE
        )  # fmt: skip
