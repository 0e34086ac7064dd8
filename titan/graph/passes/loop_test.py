"""Loops that passes edit: the edited graph against the same turns written out."""

import torch
import torch.fx
from torch import nn

from titan.graph.capture.scan_layers import scan_layers
from titan.graph.capture.trace import StepFunction, capture
from titan.graph.ir.dialect import op_name
from titan.graph.ir.step_graph import StepGraph
from titan.graph.passes.added_ops import add_op
from titan.graph.passes.dead_code import dead_code
from titan.graph.passes.loop import Loop
from titan.graph.testing.steps import ONE
from titan.parallel.layout import TensorLayout

aten = torch.ops.aten
_TURNS = 4
_INPUTS = (
    torch.tensor([1.0, -2.0, 0.5]),  # init
    torch.arange(12.0).reshape(_TURNS, 3) / 10,  # stack
    torch.tensor([0.3, 0.2, -0.1]),  # shared
)


def _captured() -> StepGraph:
    """Four turns of `carry * entry + shared`, each then passed on as its sine."""

    def call(state, batch):
        (carry,) = scan_layers(
            lambda carry, weights, shared: ((carry[0] * weights["w"] + shared[0]).sin(),),
            (state["init"],),
            {"w": state["stack"]},
            (state["shared"],),
        )
        return {}, {"carry": carry}

    layouts = {
        name: TensorLayout(tuple(tensor.shape), torch.float32)
        for name, tensor in zip(("init", "stack", "shared"), _INPUTS, strict=True)
    }
    return capture(lambda mesh: StepFunction(call, nn.Module()), layouts, {}, ONE)


def _loop(graph: StepGraph) -> Loop:
    (scan,) = graph.module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    return Loop(graph.module, scan)


def _return_too(graph: StepGraph, node: torch.fx.Node) -> None:
    output = graph.module.graph.output_node()
    output.args = ((*output.args[0], node),)


def _run(graph: StepGraph) -> tuple[torch.Tensor, ...]:
    for module in reversed(list(graph.module.modules())):
        if isinstance(module, torch.fx.GraphModule):
            module.graph.lint()
            module.recompile()
    with torch.no_grad():
        return graph.module(*_INPUTS)


def _sums_and_carries() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    carry, stack, shared = _INPUTS
    sums, carries = [], []
    for entry in stack:
        sums.append(carry * entry + shared)
        carry = sums[-1].sin()
        carries.append(carry)
    return sums, carries


def _only(loop: Loop, target: torch._ops.OpOverload) -> torch.fx.Node:
    (node,) = loop.body.find_nodes(op="call_function", target=target)
    return node


def test_a_value_of_each_turn_is_stacked() -> None:
    graph = _captured()
    loop = _loop(graph)
    assert (loop.length, loop.num_carry, len(loop.inputs())) == (_TURNS, 1, 3)
    stack = loop.stack_result(_only(loop, aten.add.Tensor))
    assert tuple(stack.meta["val"].shape) == (_TURNS, 3)
    _return_too(graph, stack)
    sums, carries = _sums_and_carries()
    for got, expected in zip(_run(graph), (carries[-1], torch.stack(sums)), strict=True):
        assert torch.equal(got, expected)


def test_a_stack_is_scanned() -> None:
    graph = _captured()
    loop = _loop(graph)
    (stack,) = (node for node in graph.module.graph.nodes if node.meta.get("leaf") == "stack")
    with graph.module.graph.inserting_before(loop.scan):
        flipped = add_op(graph.module.graph, aten.flip.default, (stack, [0]), stack.meta["val"], like=loop.scan)
    entry = loop.scan_over(flipped)
    assert loop.inputs().index(entry) == 2  # after the stack that was there, before what is shared
    _only(loop, aten.mul.Tensor).update_arg(1, entry)
    carry, entries, shared = _INPUTS
    for index in reversed(range(_TURNS)):
        carry = (carry * entries[index] + shared).sin()
    assert torch.equal(_run(graph)[0], carry)


def test_a_value_goes_around_for_turns() -> None:
    """A queue of two: each turn adds what the sum was two turns ago; the last two sums come out."""
    graph = _captured()
    loop = _loop(graph)
    (init,) = (node for node in graph.module.graph.nodes if node.meta.get("leaf") == "init")
    new, old = loop.carry(init), loop.carry(init)
    assert loop.inputs()[:3] == [loop.inputs()[0], new, old]
    add = _only(loop, aten.add.Tensor)
    stack = loop.stack_result(add)
    add.update_arg(1, old)
    last, last_but_one = loop.pass_on(new, add), loop.pass_on(old, new)
    for node in (stack, last, last_but_one):
        _return_too(graph, node)
    carry, entries, _ = _INPUTS
    queue, sums = [_INPUTS[0], _INPUTS[0]], []
    for entry in entries:
        sums.append(carry * entry + queue[1])
        carry, queue = sums[-1].sin(), [sums[-1], queue[0]]
    for got, expected in zip(_run(graph), (carry, torch.stack(sums), sums[-1], sums[-2]), strict=True):
        assert torch.equal(got, expected)


def test_a_carried_value_is_added_before_the_stacked_ones() -> None:
    graph = _captured()
    loop = _loop(graph)
    stack = loop.stack_result(_only(loop, aten.add.Tensor))
    (init,) = (node for node in graph.module.graph.nodes if node.meta.get("leaf") == "init")
    loop.carry(init)
    _return_too(graph, stack)
    assert torch.equal(_run(graph)[1], torch.stack(_sums_and_carries()[0]))


def test_dead_code_takes_unused_results_and_inputs_out_of_loops() -> None:
    plain, graph = _captured(), _captured()
    loop = _loop(graph)
    (stack,) = (node for node in graph.module.graph.nodes if node.meta.get("leaf") == "stack")
    with loop.body.inserting_before(loop.body.output_node()):
        add = _only(loop, aten.add.Tensor)
        unused = add_op(loop.body, aten.exp.default, (loop.scan_over(stack),), add.meta["val"], like=add)
    kept = loop.stack_result(unused), loop.stack_result(add), loop.stack_result(unused)
    _return_too(graph, kept[1])
    pruned = dead_code(graph)
    after = _loop(pruned)
    assert len(after.inputs()) == 3 and len(after.scan.meta["val"]) == len(after.body.output_node().args[0]) == 2
    assert not after.body.find_nodes(op="call_function", target=aten.exp.default)
    for got, expected in zip(_run(pruned), (*_run(plain), torch.stack(_sums_and_carries()[0])), strict=True):
        assert torch.equal(got, expected)
    assert dead_code(pruned).text() == pruned.text()
    assert len(_loop(graph).inputs()) == 4  # what was given is as it was


def test_dead_code_keeps_a_stack_for_the_length_and_the_first_only_if_it_must() -> None:
    def shapes(*, read: str | None) -> list[str]:
        graph = _captured()
        loop = _loop(graph)
        entries = {"stack": loop.inputs()[1]}
        (shared,) = (node for node in graph.module.graph.nodes if node.meta.get("leaf") == "shared")
        with graph.module.graph.inserting_before(loop.scan):
            other = add_op(
                graph.module.graph,
                aten.expand.default,
                (shared, [_TURNS, 3]),
                shared.meta["val"].expand(_TURNS, 3),
                like=loop.scan,
            )
        entries["other"] = loop.scan_over(other)
        carry = loop.inputs()[0]
        _only(loop, aten.mul.Tensor).update_arg(1, carry if read is None else entries[read])
        pruned = dead_code(graph)
        _run(pruned)
        return [
            node.meta.get("leaf") or op_name(node.target) for node in _loop(pruned).scan.args[2]
        ]  # fmt: skip

    assert shapes(read="stack") == ["stack"]
    assert shapes(read="other") == ["aten.expand.default"]
    assert shapes(read=None) == ["stack"]


def test_dead_code_removes_a_loop_that_nobody_needs() -> None:
    graph = _captured()
    output = graph.module.graph.output_node()
    output.args = ((graph.module.graph.find_nodes(op="placeholder")[0],),)
    assert [node.op for node in dead_code(graph).module.graph.nodes] == ["placeholder"] * 3 + ["output"]
