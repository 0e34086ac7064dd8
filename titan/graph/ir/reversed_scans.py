"""Loops of a graph that go from the last layer to the first."""

import torch
import torch.fx


def find_reversed_scans(graph: torch.fx.Graph) -> tuple[set[torch.fx.Node], set[torch.fx.Node]]:
    """Scans that go from the last entry to the first, and the flips around them that say so.

    PyTorch's op knows one direction: a loop the other way has everything that it scans and stacks flipped. On a device
    each flip would be a copy of a whole stack, of parameters for one.

    Returns:
      The scans, and the flips that have no other purpose.
    """
    scans = {
        node
        for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
        if all(map(_is_flip, node.args[2])) and all(map(_is_flip, _stack_users(node)))
    }
    while True:
        before = {node: user for scan in scans for node in scan.args[2] for user in node.users}
        shared = {scan for scan in scans if any(user not in scans for node in scan.args[2] for user in node.users)}
        if not shared:
            return scans, {*before, *(user for scan in scans for user in _stack_users(scan))}
        scans -= shared


def _stack_users(scan: torch.fx.Node) -> list[torch.fx.Node]:
    num_carry = len(scan.args[1])
    return [user for result in scan.users if result.args[1] >= num_carry for user in result.users]


def _is_flip(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.aten.flip.default and list(node.args[1]) == [0]
