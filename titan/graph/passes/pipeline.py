"""Runs passes over a StepGraph: in order, timed, dumped after each, and disabled by name."""

import dataclasses
import itertools
import logging
import pathlib
import time
from collections.abc import Callable, Sequence

from titan.graph.ir.dialect import check_dialect, describe, graphs_of
from titan.graph.ir.step_graph import StepGraph

Pass = Callable[[StepGraph], StepGraph]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PassReport:
    """What one pass did: op counts before and after, and its time in seconds."""

    name: str
    ops_before: int
    ops_after: int
    seconds: float


def run_passes(
    graph: StepGraph, passes: Sequence[Pass], *, disabled: Sequence[str] = (), dump_folder: pathlib.Path | None = None
) -> tuple[StepGraph, list[PassReport]]:
    """Applies `passes` in order; a pass is named after its function.

    A pass takes a StepGraph and returns one, and may not change the graph that it was given. The result of each is
    checked: well formed, in the dialect, every op with its metadata, and with inputs and outputs of the same names,
    shapes and dtypes.

    Args:
      disabled: names of passes to leave out.
      dump_folder: writes `00_captured.txt`, then `NN_<pass>.txt` after each pass.

    Raises:
      ValueError: a disabled name is not a pass, two passes have one name, or a pass broke these rules.
      DialectError: a pass brought in an op that the dialect does not admit.
    """
    names = [step.__name__ for step in passes]
    if len(set(names)) != len(names):
        raise ValueError(f"two passes have one name: {names}")
    unknown = sorted(set(disabled) - set(names))
    if unknown:
        raise ValueError(f"no pass named {', '.join(unknown)}; the passes are {', '.join(names)}")
    _dump(graph, dump_folder, 0, "captured")
    reports = []
    for number, step in enumerate(passes, 1):
        if step.__name__ in disabled:
            continue
        before = _snapshot(graph)
        start = time.perf_counter()
        result = step(graph)
        seconds = time.perf_counter() - start
        if _snapshot(graph) != before:
            raise ValueError(f"pass {step.__name__} changed the graph that it was given; it must edit a copy")
        _check(graph, result, step.__name__)
        reports.append(PassReport(step.__name__, graph.num_ops, result.num_ops, seconds))
        _log.debug("pass %s", reports[-1])
        _dump(result, dump_folder, number, step.__name__)
        graph = result
    return graph, reports


def _snapshot(graph: StepGraph) -> list[tuple[object, ...]]:
    return [(node, node.target, node.args, node.kwargs) for part in graphs_of(graph.module) for node in part.nodes]


def _check(before: StepGraph, after: StepGraph, name: str) -> None:
    check_dialect(after.module)
    for part in graphs_of(after.module):
        part.lint()
        for node in part.nodes:
            missing = [key for key in ("val", "region", "module_fqn", "source") if key not in node.meta]
            if node.op == "call_function" and missing:
                raise ValueError(f"pass {name} made {describe(node)} without meta {', '.join(missing)}")
    if dataclasses.replace(after, module=before.module) != before:
        raise ValueError(f"pass {name} changed what the graph says of its mesh, state, batch or metrics")
    inputs, outputs = ([ends(graph) for graph in (before, after)] for ends in (_inputs, _outputs))
    for kind, (old, new) in (("inputs", inputs), ("outputs", outputs)):
        for position, (was, is_now) in enumerate(itertools.zip_longest(old, new)):
            if was != is_now:
                raise ValueError(f"pass {name} changed the graph's {kind}: number {position} was {was} and is {is_now}")


def _inputs(graph: StepGraph) -> list[tuple[object, ...]]:
    nodes = graph.module.graph.find_nodes(op="placeholder")
    return [(node.name, node.meta.get("leaf"), node.meta["val"].dtype, tuple(node.meta["val"].shape)) for node in nodes]


def _outputs(graph: StepGraph) -> list[tuple[object, ...]]:
    values = [node.meta["val"] for node in graph.module.graph.output_node().args[0]]
    return [(value.dtype, tuple(value.shape)) for value in values]


def _dump(graph: StepGraph, folder: pathlib.Path | None, number: int, name: str) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:02d}_{name}.txt").write_text(graph.text())
