"""The memory policy in loops over layers: what a turn of the forward stacks for the backward's turn of the same layer.

As captured, the backward loop has each layer's input and makes everything else again. For a value to be kept the
forward loop stacks it and the backward loop scans it. What is offloaded is stacked in host memory. It may go around
either loop for a number of turns first: the forward then stacks what it made that many turns ago, and the backward
fetches what it needs that many turns later, so that no turn waits for a transfer.
"""

import torch
import torch.fx

from titan.graph.passes.activations import actions
from titan.graph.passes.added_ops import add_offload, add_op, add_reload
from titan.graph.passes.loop import Loop
from titan.graph.passes.memory_rules import MemoryPolicy

aten = torch.ops.aten


def apply_to_loops(module: torch.fx.GraphModule, policy: MemoryPolicy, *, prefetch: int) -> None:
    """Applies a policy to every forward loop and its backward, in place. What becomes unused stays.

    Args:
      prefetch: turns that an offloaded value is fetched ahead.
    """
    scans = [scan for scan in module.graph.find_nodes(op="call_function", target=_SCAN) if "loop" in scan.meta]
    forward = {scan.meta["loop"]: Loop(module, scan) for scan in scans if scan.meta["region"] != "backward"}
    for scan in scans:
        if scan.meta["region"] == "backward":
            _apply(forward[scan.meta["loop"]], Loop(module, scan), policy, prefetch)


_SCAN = torch.ops.higher_order.scan


def _apply(forward: Loop, backward: Loop, policy: MemoryPolicy, prefetch: int) -> None:
    num_grads, num_carry = backward.num_carry, forward.num_carry
    given = backward.inputs()[num_grads : num_grads + num_carry]  # what a turn of the forward is given
    made = [node for node in backward.body.nodes if node.op == "call_function" and "turn_op" in node.meta]
    action_of = actions([*given, *made], policy, reshard=True)
    turn = _Forward(forward)
    for node, order in _wanted(backward, action_of).items():
        if node in given and action_of[node] == "save":
            continue
        source = turn.find(node)
        is_permuted = order != sorted(order)
        if is_permuted:  # a stack is contiguous, and so is its entry: the value keeps its strides by being turned
            source = turn.add(source, aten.permute.default, order)
        if action_of[node] == "save":
            kept = backward.scan_over(_flipped(backward, forward.stack_result(source)))
        else:
            kept = _through_host(forward, backward, source, min(prefetch, forward.length - 1))
        if is_permuted:
            with backward.body.inserting_before(_first_op(backward)):
                inverse = sorted(range(len(order)), key=order.__getitem__)
                kept = add_op(backward.body, aten.permute.default, (kept, inverse), node.meta["val"], like=node)
        kept.meta["turn_op"] = node.meta["turn_op"]
        node.replace_all_uses_with(kept)
    for node in made:
        node.meta |= {"memory_policy": action_of[node], "region": "backward"}


def _wanted(backward: Loop, action_of: dict[torch.fx.Node, str]) -> dict[torch.fx.Node, list[int]]:
    """The values not to be made again that the backward has a use for, with their dims as they lie in memory."""
    found: dict[torch.fx.Node, list[int]] = {}
    seen, pending = set(), [backward.body.output_node()]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        order = _memory_order(node.meta["val"]) if action_of.get(node, "recompute") != "recompute" else None
        if order is None:
            pending.extend(node.all_input_nodes)
        else:
            found[node] = order
    return {node: found[node] for node in action_of if node in found}


def _memory_order(value: torch.Tensor | tuple) -> list[int] | None:
    """The dims as they lie in memory, outermost first; None where there are gaps or elements share memory."""
    order = sorted(range(value.ndim), key=lambda dim: (-value.stride(dim), dim))
    return order if value.permute(order).is_contiguous() else None


class _Forward:
    """The forward's body, as the place of the values that the backward's body makes again."""

    def __init__(self, loop: Loop):
        self._body = loop.body
        self._by_name = {node.meta["turn_op"]: node for node in loop.body.nodes if "turn_op" in node.meta}

    def find(self, node: torch.fx.Node) -> torch.fx.Node:
        """The value of a node of the backward's body; the forward may not have had a use for it."""
        name = node.meta["turn_op"]
        if name not in self._by_name:
            inputs = {used: self.find(used) for used in node.all_input_nodes}
            with self._body.inserting_before(self._body.output_node()):
                self._by_name[name] = self._body.node_copy(node, inputs.__getitem__)
        return self._by_name[name]

    def add(self, node: torch.fx.Node, target: torch._ops.OpOverload, *args: object) -> torch.fx.Node:
        """An op on a value."""
        with self._body.inserting_before(self._body.output_node()):
            return add_op(
                self._body, target, (node, *args), target(node.meta["val"], *args), like=node, region="forward"
            )


def _flipped(backward: Loop, stack: torch.fx.Node) -> torch.fx.Node:
    """A stack in the order in which the backward goes through the layers."""
    with stack.graph.inserting_before(backward.scan):
        return add_op(stack.graph, aten.flip.default, (stack, [0]), stack.meta["val"], like=backward.scan)


def _through_host(forward: Loop, backward: Loop, source: torch.fx.Node, num_turns: int) -> torch.fx.Node:
    """Takes a value from the forward's turn by way of host memory to the backward's, where it is returned.

    Args:
      num_turns: for how many turns it stays on the device on either side.
    """
    value = source.meta["val"]
    queue, oldest = [], source
    for _ in range(num_turns):
        graph = forward.scan.graph
        with graph.inserting_before(forward.scan):
            zeros = add_op(graph, aten.zeros.default, (list(value.shape),), value, like=forward.scan, region="forward")
        zeros.kwargs = {"dtype": value.dtype, "device": value.device}
        carried = forward.carry(zeros)
        queue.append(forward.pass_on(carried, oldest))
        oldest = carried
    with forward.body.inserting_before(forward.body.output_node()):
        moved = add_offload(oldest)
    entry = backward.scan_over(_flipped(backward, forward.stack_result(moved)))
    with backward.body.inserting_before(_first_op(backward)):
        fetched = add_reload(entry, source)
    if not num_turns:
        return fetched
    carried = [backward.carry(last) for last in queue]
    for node, following in zip(carried, [*carried[1:], fetched], strict=True):
        backward.pass_on(node, following)
    return carried[0]


def _first_op(loop: Loop) -> torch.fx.Node:
    return next(node for node in loop.body.nodes if node.op != "placeholder")
