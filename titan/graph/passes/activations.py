"""What the values of a forward pass are, and what a memory policy does with each."""

import operator
from collections.abc import Iterable

import torch
import torch.fx

from titan.graph.ir.dialect import VIEWS, group_argument, op_name
from titan.graph.passes.memory_rules import MemoryPolicy
from titan.kernels.jax_op import OPS

_KINDS = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "_scaled_mm", "convolution"), "matmul"),
    **dict.fromkeys(
        (
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_fused_attention_overrideable",
            "scaled_dot_product_attention",
        ),
        "attention",
    ),
}


def block_of(module_fqn: str) -> str:
    """The layer that a module is part of: its path up to the first segment that is no name (`3`, `*`); "" if none."""
    segments = module_fqn.split(".")
    for index, segment in enumerate(segments):
        if segment and not segment.isidentifier():
            return ".".join(segments[: index + 1])
    return ""


def is_forward(node: torch.fx.Node) -> bool:
    """Whether an op belongs to the forward pass, the loss included."""
    return node.op == "call_function" and node.meta.get("region") in ("forward", "loss")


def is_free(node: torch.fx.Node) -> bool:
    """Whether an op costs nothing to do again: a view, or a constant."""
    return node.op == "call_function" and (node.target in VIEWS or not node.all_input_nodes)


def actions(nodes: Iterable[torch.fx.Node], policy: MemoryPolicy, *, reshard: bool) -> dict[torch.fx.Node, str]:
    """What to do with the value of each forward op, should the backward pass need it: save, recompute or offload.

    Views and constants are always made again. An op with several results is made again if one of them is; what is saved
    or offloaded are the results. A layer's parameters are gathered again or kept whatever the rules say; those outside
    of layers, of the head for one, are kept, since the forward pass ends and the backward pass begins with them. So is
    what a layer gives to what comes after all layers: else it would be made twice, for that and for the layer itself.

    Args:
      nodes: the forward ops of one graph, and inputs that stand for what a layer is given.
      policy: the rules.
      reshard: gather the parameters of layers again.
    """
    nodes = list(nodes)
    given_to = _given_to(nodes)
    found = {}
    for node in nodes:
        if isinstance(node.meta["val"], torch.Tensor):
            found[node] = _action(node, given_to.get(node), policy, reshard)
        else:
            found[node] = "recompute"
    return found


def _action(node: torch.fx.Node, given_to: str | None, policy: MemoryPolicy, reshard: bool) -> str:
    maker = node.args[0] if node.target is operator.getitem else node
    if maker.target is torch.ops.higher_order.scan or given_to == "":
        return "save"
    if given_to:
        return policy.action(given_to, "input", in_layer=True)
    if is_free(node):
        return "recompute"
    fqn = maker.meta.get("module_fqn", "")
    in_layer = bool(block_of(fqn))
    if maker.meta.get("parameter_gather"):
        return "recompute" if reshard and in_layer else "save"
    return policy.action(fqn, _kind(maker), in_layer=in_layer)


def _kind(node: torch.fx.Node) -> str | None:
    if node.meta.get("token_gather"):
        return None  # as large as all devices' tokens together: no kind that a policy would keep
    namespace, name = op_name(node.target).split(".")[:2] if "." in op_name(node.target) else ("", "")
    if namespace == "_c10d_functional" or (group_argument(node) is not None and name != "axis_index"):
        return "collective"
    kernel = OPS.get(f"{namespace}::{name}")
    return kernel.memory_kind if kernel else _KINDS.get(name)


def _given_to(nodes: list[torch.fx.Node]) -> dict[torch.fx.Node, str]:
    """Values that one layer, or what comes before all layers, makes and the next layer alone reads, with that layer.

    For what a layer gives to what comes after all layers, "". What several layers share, such as a mask, is not meant,
    were it two of them and made in the first.
    """
    blocks = list(dict.fromkeys(block_of(node.meta.get("module_fqn", "")) for node in nodes))
    found = {}
    for node in nodes:
        own = block_of(node.meta.get("module_fqn", ""))
        users = {block_of(user.meta.get("module_fqn", "")) for user in node.users if is_forward(user)} - {own}
        users = users - {""} or users
        if len(users) != 1 or not isinstance(node.meta["val"], torch.Tensor):
            continue
        (user,) = users
        source = node
        while is_free(source) and source.all_input_nodes:
            source = source.all_input_nodes[0]
        is_next = not (own and user) or blocks.index(user) == blocks.index(own) + 1
        if is_next and source.meta["val"].is_floating_point() and not source.meta.get("parameter_gather"):
            found[source] = user
    return found
