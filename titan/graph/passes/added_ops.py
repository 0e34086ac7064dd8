"""Ops that the memory policy adds to a graph. Each is inserted where its graph inserts at the time."""

import operator
from collections.abc import Sequence

import torch
import torch.fx

import titan.graph._compat  # noqa: F401  registers torch.ops.ao
import titan.graph.ir.barrier  # noqa: F401  registers torch.ops.titan.barrier


def add_op(
    graph: torch.fx.Graph, target: object, args: tuple, value: object, *, like: torch.fx.Node, region: str = "backward"
) -> torch.fx.Node:
    """An op with the labels of another one.

    Args:
      value: its metadata.
      like: the op, maybe of another graph, whose module and source it has.
      region: the part of the step that it belongs to.
    """
    node = graph.call_function(target, args)
    node.meta = {key: like.meta.get(key, "") for key in ("module_fqn", "source")} | {"region": region, "val": value}
    return node


def add_barrier(nodes: Sequence[torch.fx.Node], after: torch.fx.Node | None) -> dict[torch.fx.Node, torch.fx.Node]:
    """For each node its value as it is to be had once `after` has been computed too."""
    graph = nodes[0].graph
    through = [*nodes, *([after] if after is not None and after not in nodes else [])]
    values = [node.meta["val"] for node in through]
    barrier = add_op(graph, torch.ops.titan.barrier.default, (through,), values, like=nodes[0])
    return {
        node: add_op(graph, operator.getitem, (barrier, index), values[index], like=node)
        for index, node in enumerate(nodes)
    }


def add_offload(node: torch.fx.Node) -> torch.fx.Node:
    """A forward value in host memory, contiguous."""
    value = node.meta["val"].contiguous()
    labels = {"like": node, "region": "forward"}
    moved = add_op(node.graph, torch.ops.ao.offload.default, (node,), value, **labels)
    return add_op(node.graph, torch.ops.ao.wait_tensor.default, (moved,), value, **labels)


def add_reload(moved: torch.fx.Node, origin: torch.fx.Node, after: torch.fx.Node | None = None) -> torch.fx.Node:
    """The value of `origin`, which is in host memory, back on the device, not before `after` has been computed."""
    if after is not None:
        moved = add_barrier([moved], after)[moved]
    value = origin.meta["val"]
    form = () if value.is_contiguous() else (list(value.shape), list(value.stride()))
    back = add_op(moved.graph, torch.ops.ao.reload.default, (moved, value.device, *form), value, like=origin)
    return add_op(moved.graph, torch.ops.ao.wait_tensor.default, (back,), value, like=origin)
