"""The memory policy: which values of the forward pass wait for the backward pass, where, and which are made again."""

import collections
import dataclasses
from collections.abc import Sequence

import torch
import torch.fx

from titan.graph.ir.dialect import graphs_of
from titan.graph.ir.step_graph import StepGraph
from titan.graph.passes.activations import actions, block_of, is_forward, is_free
from titan.graph.passes.added_ops import add_barrier, add_offload, add_reload
from titan.graph.passes.dead_code import remove_unused
from titan.graph.passes.loop_memory import apply_to_loops
from titan.graph.passes.memory_rules import MemoryPolicy, parse_memory_policy
from titan.graph.passes.options import PassOptions
from titan.graph.passes.pipeline import Pass


def configured_memory_policy(options: PassOptions) -> Pass:
    """The pass that applies a run's policy. Raises MemoryPolicyError for what is none."""
    return memory_policy_pass(
        parse_memory_policy(options.memory_policy),
        reshard=options.reshard_after_forward,
        prefetch=options.offload_prefetch,
    )


def memory_policy_pass(policy: MemoryPolicy, *, reshard: bool, prefetch: int) -> Pass:
    """The pass that applies a policy.

    A value to be recomputed is made again from the nearest values that are kept, right before the part of the backward
    pass that needs it: the ops in between are duplicated, behind a barrier that holds them back until the gradient has
    come that far. A value to be offloaded is moved to host memory after it is made, and back before it is needed. A
    loop over layers has the recomputation in its backward from the start: there, values to be kept are stacked. Each
    forward op has the decision in `meta["memory_policy"]`.

    Args:
      policy: the rules.
      reshard: gather the parameters of layers again for the backward pass, beginning a layer ahead, instead of keeping
        them gathered. In loops they are gathered again in any case.
      prefetch: how many layers ahead offloaded values are moved back.
    """

    def memory_policy(graph: StepGraph) -> StepGraph:
        graph = graph.copy()
        policy.check({node.meta.get("module_fqn", "") for part in graphs_of(graph.module) for node in part.nodes})
        apply_to_loops(graph.module, policy, prefetch=prefetch)
        action_of = actions(filter(is_forward, graph.module.graph.nodes), policy, reshard=reshard)
        for node in action_of:
            if is_free(node) and all(action_of.get(used, "save") == "save" for used in node.all_input_nodes):
                action_of[node] = "save"  # a view of what is there takes no memory
            node.meta["memory_policy"] = action_of[node]
        offloaded: dict[torch.fx.Node, torch.fx.Node] = {}
        for layer in _layers(graph.module.graph, action_of, prefetch):
            _rematerialize(layer, action_of, offloaded)
        remove_unused(graph.module)
        return graph

    return memory_policy


@dataclasses.dataclass
class _Layer:
    """A layer's part of one backward pass.

    Attributes:
      users: its ops that read values of the forward pass which are not there any more, in the order of the graph.
      gradient: the gradient that it begins with: once that is there, the layer's turn has come.
      gathers_after, reloads_after: gradients of layers that have their turn earlier; None: at any time.
    """

    users: list[torch.fx.Node]
    gradient: torch.fx.Node | None = None
    gathers_after: torch.fx.Node | None = None
    reloads_after: torch.fx.Node | None = None


def _layers(graph: torch.fx.Graph, action_of: dict[torch.fx.Node, str], prefetch: int) -> list[_Layer]:
    # There is a backward pass for each microbatch.
    passes: list[dict[str, list[torch.fx.Node]]] = []
    in_backward = False
    for node in graph.nodes:
        if is_forward(node):
            in_backward = False
        if node.op == "call_function" and node.meta.get("region") == "backward":
            if not in_backward:
                in_backward = True
                passes.append({})
            passes[-1].setdefault(block_of(node.meta.get("module_fqn", "")), []).append(node)
    found = []
    for ops_by_block in passes:
        layers = [layer for ops in ops_by_block.values() if (layer := _layer(ops, action_of))]
        for index, layer in enumerate(layers):
            layer.gathers_after = layers[max(index - 1, 0)].gradient
            layer.reloads_after = layers[max(index - prefetch, 0)].gradient
        found += layers
    return found


def _layer(ops: list[torch.fx.Node], action_of: dict[torch.fx.Node, str]) -> _Layer | None:
    """Out of a layer's backward ops; None where they find all that they read."""
    users = [op for op in ops if any(action_of.get(used, "save") != "save" for used in op.all_input_nodes)]
    if not users:
        return None
    read = (used for op in ops for used in op.all_input_nodes if used.meta.get("region") == "backward")
    return _Layer(users, next((used for used in read if used < users[0]), None))


def _rematerialize(
    layer: _Layer, action_of: dict[torch.fx.Node, str], offloaded: dict[torch.fx.Node, torch.fx.Node]
) -> None:
    """Gives a layer's backward ops what they need.

    Args:
      offloaded: values moved to host memory so far, for this layer or one before; those of this one are added.
    """

    def is_kept(node: torch.fx.Node) -> bool:
        return action_of.get(node, "save") == "save"

    def not_before(node: torch.fx.Node) -> torch.fx.Node | None:
        return layer.gathers_after if node.meta.get("parameter_gather") else layer.gradient

    first = layer.users[0]
    wanted = [used for user in layer.users for used in user.all_input_nodes if not is_kept(used)]
    needed = _closure(wanted, action_of)
    held: dict[torch.fx.Node | None, dict[torch.fx.Node, None]] = collections.defaultdict(dict)
    for node in needed:
        if action_of[node] == "recompute":
            held[not_before(node)].update(dict.fromkeys(filter(is_kept, node.all_input_nodes)))
    with first.graph.inserting_before(first):
        behind = {after: add_barrier(list(nodes), after) for after, nodes in held.items() if nodes}
    made: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in needed:
        if action_of[node] == "offload":
            if node not in offloaded:
                with node.graph.inserting_before(node.next):
                    offloaded[node] = add_offload(node)
            with node.graph.inserting_before(first):
                made[node] = add_reload(offloaded[node], node, layer.reloads_after)
            continue
        available = {**behind.get(not_before(node), {}), **made}
        with node.graph.inserting_before(first):
            made[node] = node.graph.node_copy(node, available.__getitem__)
        made[node].meta["region"] = "backward"
    for user in layer.users:
        for used in user.all_input_nodes:
            if used in made:
                user.replace_input_with(used, made[used])


def _closure(wanted: Sequence[torch.fx.Node], action_of: dict[torch.fx.Node, str]) -> list[torch.fx.Node]:
    """What is to be made again or moved back for the values wanted, each after what it is made of."""
    order: dict[torch.fx.Node, None] = {}
    pending = [(node, False) for node in reversed(wanted)]
    while pending:
        node, has_inputs = pending.pop()
        if node in order or action_of.get(node, "save") == "save":
            continue
        if has_inputs or action_of[node] == "offload":
            order[node] = None
            continue
        pending.append((node, True))
        pending += [(used, False) for used in node.all_input_nodes]
    return list(order)
