"""Splits a graph into segments of ATen ops and, between them, the ops that are no ATen ops.

A step with FSDP has few segments: casts before the gathers, forward and backward between gathers and reduce-scatters,
the gradients' norm, the optimizer.
"""

import collections
import dataclasses
import operator

import torch
import torch.fx
from torch.fx.node import map_arg

from titan.graph.ir.dialect import describe, op_name
from titan.graph.ir.reversed_scans import find_reversed_scans
from titan.graph.torch_tpu.segment import Input, Op, Ref, Segment

_NAMESPACES = ("aten", "prims")


@dataclasses.dataclass(frozen=True)
class Level:
    """One stage of a graph: ops that are left to titan's own lowering, then a segment that may use their results.

    Attributes:
      others: collectives, kernels, loops with the flips that turn them round, and what takes their results apart.
      nodes: the segment's ops.
      inputs: nodes outside the segment whose results it uses, in the order of the segment's inputs.
      outputs: the segment's ops whose results others use, in the order of the segment's outputs.
    """

    others: tuple[torch.fx.Node, ...]
    nodes: tuple[torch.fx.Node, ...]
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]


def split(graph: torch.fx.Graph) -> list[Level]:
    """The stages of a graph, in order; each uses only results of those before it.

    An op belongs to the first stage at which its arguments are there, so that there are as few segments as the chain of
    other ops allows.
    """
    level: dict[torch.fx.Node, int] = {}
    others: dict[int, list[torch.fx.Node]] = collections.defaultdict(list)
    segments: dict[int, list[torch.fx.Node]] = collections.defaultdict(list)
    is_aten: dict[torch.fx.Node, bool] = {}
    _, flips = find_reversed_scans(graph)
    for node in graph.nodes:
        if node.op != "call_function":
            level[node] = 0
            continue
        level[node] = max((level[used] for used in node.all_input_nodes), default=0)
        is_getitem = node.target is operator.getitem
        is_aten[node] = is_aten[node.args[0]] if is_getitem else _is_aten(node) and node not in flips
        if is_aten[node]:
            segments[level[node]].append(node)
        else:
            level[node] += not is_getitem
            others[level[node]].append(node)
    return [_level(others[index], segments[index]) for index in sorted({*others, *segments})]


def _is_aten(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _NAMESPACES


def _level(others: list[torch.fx.Node], nodes: list[torch.fx.Node]) -> Level:
    inside = set(nodes)
    inputs = {used: None for node in nodes for used in node.all_input_nodes if used not in inside}
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    return Level(tuple(others), tuple(nodes), tuple(inputs), tuple(outputs))


def segment_of(level: Level, constants: dict[torch.fx.Node, torch.Tensor]) -> Segment:
    """The segment of a stage as plain data.

    Args:
      constants: the graph's constants. They become part of the segment, and are not among its inputs.
    """
    return Segment(
        inputs=tuple(
            Input(node.name, tuple(node.meta["val"].shape), node.meta["val"].dtype)
            for node in level.inputs
            if node not in constants
        ),
        constants={node.name: constants[node] for node in level.inputs if node in constants},
        ops=tuple(map(_op, level.nodes)),
        outputs=tuple(node.name for node in level.outputs),
    )


def _op(node: torch.fx.Node) -> Op:
    args, kwargs = map_arg((node.args, node.kwargs), lambda used: Ref(used.name))
    return Op(
        name=node.name,
        target="getitem" if node.target is operator.getitem else op_name(node.target),
        args=tuple(map(_plain, args)),
        kwargs={name: _plain(value) for name, value in kwargs.items()},
        scope="/".join(filter(None, (node.meta.get("region"), node.meta.get("module_fqn")))),
        description=describe(node),
    )


def _plain(value: object) -> object:
    """FX's immutable lists as plain ones, which are pickled without FX."""
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
