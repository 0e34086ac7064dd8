"""The dialect of step graphs, and the check that a captured graph is in it.

A step graph may hold functional ATen ops, functional collectives, PyTorch's `scan`, the activation offload ops, and titan's
own custom ops. In-place ops, random ops that draw from a global generator, and anything else are refused with the op, the
module and the line of code that brought it in.
"""

import operator

import torch
import torch.fx

_NAMESPACES = ("aten", "_c10d_functional", "ao", "titan", "prims")


class DialectError(ValueError):
    """A captured graph holds an op that step graphs do not admit."""


def op_name(target: object) -> str:
    """`namespace.op.overload` of an op overload; the plain name of anything else."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def describe(node: torch.fx.Node) -> str:
    """A node for an error message: op, module and source line."""
    parts = [op_name(node.target)]
    if node.meta.get("module_fqn"):
        parts.append(f"in module {node.meta['module_fqn']}")
    if node.meta.get("source"):
        parts.append(f"at {node.meta['source']}")
    return " ".join(parts)


def group_argument(node: torch.fx.Node) -> int | None:
    """The position of the argument that names a collective's mesh axis; None for an op that does not communicate."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("_c10d_functional", "titan"):
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    return names.index("group_name") if "group_name" in names else None


def check_dialect(graph: torch.fx.Graph) -> None:
    """Raises DialectError at the first node that the dialect does not admit."""
    for node in graph.nodes:
        if node.op == "call_module" or node.op == "call_method":
            raise DialectError(f"{node.op} {node.target} is not an op")
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            if node.target.name() != "scan":
                raise DialectError(f"{describe(node)}: the only higher-order op in a step is scan")
            continue
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in _NAMESPACES:
            raise DialectError(f"{describe(node)}: a step holds only ops of {', '.join(_NAMESPACES)}")
        if node.target._schema.is_mutable:
            raise DialectError(f"{describe(node)}: ops that write to their inputs are not admitted; return a new tensor")
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise DialectError(f"{describe(node)}: draws from a global generator; pass a counter-based key in the batch")
