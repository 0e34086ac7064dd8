"""StepGraph: its text and its copy."""

import re

import torch
from torch._higher_order_ops.scan import scan

from titan.graph.ir.dialect import graphs_of
from titan.graph.testing.steps import HSDP, capture_metric, capture_training, ops


def test_text_has_a_line_for_every_node_with_shape_and_place() -> None:
    graph = capture_training(HSDP)
    lines = graph.text().splitlines()
    assert len(lines) == len(graph.module.graph.nodes)
    assert re.fullmatch(r"%\S+: float32\[2, 8\] = input first.weight", lines[0])
    assert lines[-1].startswith("return [%") and lines[-1].count("%") == len(graph.state) + 1
    assert any(
        re.fullmatch(
            r"%\S+: float32\[2\] = _c10d_functional.all_reduce.default\(%\S+, sum, dp_replicate\)"
            r"  # backward first \S+:\d+",
            line,
        )
        for line in lines
    )
    (norm,) = [line for line in lines if "aten.native_layer_norm.default(" in line]
    assert ": (float32[2, 8], float32[2, 1], float32[2, 1]) =" in norm
    assert "# forward blocks.1 " in norm
    assert any(re.search(r": float32\[2, 8\] = getitem\(%native_layer_norm, 0\)", line) for line in lines)
    assert "= constant _tensor_constant0" in capture_metric(lambda x, _: x + torch.tensor(1.0)).text()


def test_a_copy_is_equal_and_independent() -> None:
    graph = capture_training(HSDP)
    text = graph.text()
    copy = graph.copy()
    assert copy.text() == text and list(graphs_of(copy.module)) != list(graphs_of(graph.module))
    assert [node.meta for node in copy.module.graph.nodes] == [node.meta for node in graph.module.graph.nodes]
    node = ops(copy)[-1]
    node.meta["region"] = "changed"
    node.replace_all_uses_with(node.all_input_nodes[0])
    copy.module.graph.erase_node(node)
    assert graph.text() == text and copy.text() != text


def test_a_copy_runs_as_it_was_last_edited() -> None:
    copy = capture_metric(lambda x, _: x * 2 + torch.tensor(1.0)).copy()
    (product,) = [node for node in ops(copy) if node.target is torch.ops.aten.mul.Tensor]
    product.update_arg(1, 5)
    assert torch.equal(copy.module(torch.ones(8, 8))[0], torch.full((8, 8), 6.0))


def test_a_copy_has_loop_bodies_of_its_own() -> None:
    graph = capture_metric(lambda x, _: scan(lambda c, w: (c * w, c.sum()), x, x.view(8, 8, 1))[0])
    copy = graph.copy()
    bodies = [list(graphs_of(module))[1] for module in (graph.module, copy.module)]
    assert str(bodies[0]) == str(bodies[1])
    (product,) = bodies[1].find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    product.update_arg(1, 3.0)
    assert str(bodies[0]) != str(bodies[1])
