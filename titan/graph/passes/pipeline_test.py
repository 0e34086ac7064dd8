"""run_passes: order, names, dumps, reports, and passes that break the rules."""

import dataclasses
import operator
from collections.abc import Callable

import pytest
import torch

from titan.graph.ir.dialect import DialectError
from titan.graph.ir.step_graph import StepGraph
from titan.graph.passes.common_subexpressions import common_subexpressions
from titan.graph.passes.dead_code import dead_code
from titan.graph.passes.no_ops import no_ops
from titan.graph.passes.pipeline import run_passes
from titan.graph.testing.steps import HSDP, capture_metric, ops
from titan.parallel.layout import TensorLayout

PASSES = (no_ops, common_subexpressions, dead_code)


@pytest.fixture
def graph() -> StepGraph:
    return capture_metric(lambda x, _: x.clone().sin() + x.clone().sin())


def test_each_stage_is_reported_and_dumped(graph, tmp_path) -> None:
    result, reports = run_passes(graph, PASSES, dump_folder=tmp_path / "new" / "folder")
    assert [(report.name, report.ops_before, report.ops_after) for report in reports] == [
        ("no_ops", 5, 3),
        ("common_subexpressions", 3, 2),
        ("dead_code", 2, 2),
    ]
    assert all(report.seconds > 0 for report in reports)
    files = sorted((tmp_path / "new" / "folder").iterdir())
    assert [file.name for file in files] == [
        "00_captured.txt",
        "01_no_ops.txt",
        "02_common_subexpressions.txt",
        "03_dead_code.txt",
    ]
    assert files[0].read_text() == graph.text() and files[-1].read_text() == result.text()
    assert graph.num_ops == 5


def test_a_disabled_pass_is_left_out(graph, tmp_path) -> None:
    _, reports = run_passes(graph, PASSES, disabled=["no_ops"], dump_folder=tmp_path)
    assert [report.name for report in reports] == ["common_subexpressions", "dead_code"]
    assert not list(tmp_path.glob("*no_ops*"))


def test_names_are_checked(graph) -> None:
    with pytest.raises(ValueError, match="no pass named cse; the passes are no_ops, common_subexpressions, dead_code"):
        run_passes(graph, PASSES, disabled=["cse"])
    with pytest.raises(ValueError, match="two passes have one name"):
        run_passes(graph, (no_ops, no_ops))


def _edited(edit: Callable[[torch.fx.Graph], None]) -> Callable[[StepGraph], StepGraph]:
    def bad_pass(graph: StepGraph) -> StepGraph:
        graph = graph.copy()
        edit(graph.module.graph)
        return graph

    return bad_pass


def _append(fx_graph: torch.fx.Graph, target, *args, **meta) -> None:
    with fx_graph.inserting_before(fx_graph.output_node()):
        fx_graph.call_function(target, args).meta.update(meta)


def _add_input(fx_graph: torch.fx.Graph) -> None:
    with fx_graph.inserting_after(_first(fx_graph)):
        fx_graph.placeholder("more").meta["val"] = torch.ones(1)


def _first(fx_graph: torch.fx.Graph) -> torch.fx.Node:
    return next(iter(fx_graph.nodes))


def _labels(fx_graph: torch.fx.Graph) -> dict[str, object]:
    meta = next(node for node in fx_graph.nodes if node.op == "call_function").meta
    return {key: meta[key] for key in ("val", "region", "module_fqn", "source")}


def _swap_output(fx_graph: torch.fx.Graph) -> None:
    _append(fx_graph, torch.ops.aten.sum.default, _first(fx_graph), **_labels(fx_graph))
    node = fx_graph.output_node().prev
    node.meta["val"] = node.meta["val"].sum()
    fx_graph.output_node().args = ((node,),)


@pytest.mark.parametrize(
    ("bad_pass", "error", "message"),
    [
        (_edited(_add_input), ValueError, "inputs: number 1 was None and is "),
        (
            _edited(lambda g: _first(g).meta.update(val=torch.ones(3))),
            ValueError,
            r"inputs: number 0 .*\(8, 8\).*\(3,\)",
        ),
        (_edited(_swap_output), ValueError, r"outputs: number 0 was .*\(8, 8\)\) and is .*\(\)\)"),
        (_edited(lambda g: setattr(g.output_node(), "args", ((),))), ValueError, "outputs: number 0 .* and is None"),
        (
            _edited(lambda g: _append(g, torch.ops.aten.cos.default, _first(g))),
            ValueError,
            "node cos_default .* without meta val",
        ),
        (
            _edited(lambda g: _append(g, torch.ops.aten.cos.default, _first(g), val=1, region="", source="")),
            ValueError,
            "without meta module_fqn",
        ),
        (
            _edited(lambda g: _append(g, torch.ops.aten.cos_.default, _first(g), **_labels(g))),
            DialectError,
            "aten.cos_.default",
        ),
        (_edited(lambda g: _append(g, operator.add, 1, 2, **_labels(g))), DialectError, "is no op of PyTorch"),
        (
            lambda graph: dataclasses.replace(graph, metrics={"loss": TensorLayout((), torch.float32)}),
            ValueError,
            "changed what the graph says of its mesh, state, batch or metrics",
        ),
        (lambda graph: dataclasses.replace(graph, mesh=HSDP), ValueError, "changed what the graph says"),
    ],
)
def test_a_pass_that_breaks_the_rules_is_refused(graph, bad_pass, error, message: str) -> None:
    with pytest.raises(error, match=message):
        run_passes(graph, [bad_pass])


def test_a_pass_that_edits_what_it_was_given_is_refused(graph) -> None:
    def in_place(graph: StepGraph) -> StepGraph:
        ops(graph)[-1].update_arg(1, 2.0)
        return graph

    with pytest.raises(ValueError, match="pass in_place changed the graph that it was given; it must edit a copy"):
        run_passes(graph, [in_place])
