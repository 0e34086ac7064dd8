"""Runs passes over a StepGraph: in order, timed, dumped after each, and disabled by name."""

import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable, Sequence

import torch.fx

from titan.graph.dialect import check_dialect
from titan.graph.step_graph import StepGraph

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

    A pass takes a StepGraph and returns one, and may not change the graph that it was given. The result of each is checked:
    well formed, in the dialect, with the same inputs and the same number of outputs.

    Args:
      disabled: names of passes to leave out.
      dump_folder: writes `00_captured.txt`, then `NN_<pass>.txt` after each pass.

    Raises:
      ValueError: a disabled name is not a pass, two passes have one name, or a pass changed the inputs or outputs.
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
        start = time.perf_counter()
        result = step(graph)
        _check(graph, result, step.__name__)
        reports.append(PassReport(step.__name__, graph.num_ops, result.num_ops, time.perf_counter() - start))
        _log.debug("pass %s", reports[-1])
        _dump(result, dump_folder, number, step.__name__)
        graph = result
    return graph, reports


def copy_graph(graph: StepGraph) -> StepGraph:
    """A copy that a pass may edit; node metadata is copied, constants are shared."""
    module = torch.fx.GraphModule(graph.module, torch.fx.Graph())
    environment: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.module.graph.nodes:
        environment[node] = module.graph.node_copy(node, lambda argument: environment[argument])
    return dataclasses.replace(graph, module=module)


def _check(before: StepGraph, after: StepGraph, name: str) -> None:
    after.module.graph.lint()
    check_dialect(after.module.graph)
    inputs = [[node.name for node in g.module.graph.find_nodes(op="placeholder")] for g in (before, after)]
    if inputs[0] != inputs[1]:
        raise ValueError(f"pass {name} changed the graph's inputs")
    outputs = [len(g.module.graph.output_node().args[0]) for g in (before, after)]
    if outputs[0] != outputs[1]:
        raise ValueError(f"pass {name} changed the number of outputs from {outputs[0]} to {outputs[1]}")


def _dump(graph: StepGraph, folder: pathlib.Path | None, number: int, name: str) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:02d}_{name}.txt").write_text(graph.text())
