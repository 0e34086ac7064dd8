"""The dialect of step graphs, and the check that a captured graph is in it.

A step graph may hold functional ops of ATen and of any library, functional collectives, PyTorch's `scan`, and the
activation offload ops. In-place ops, random ops that draw from a global generator, and anything else are refused with
the op, the module and the line of code that brought it in.
"""

import operator
from collections.abc import Hashable, Iterator

import torch
import torch.fx

from titan.graph._compat import FakeTensor

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
        aten.alias.default,
        aten.detach.default,
    }
)
"""Ops that compute nothing: their results are the elements of an input, at other places."""

EQUALISE = frozenset({"all_reduce", "all_gather_into_tensor", "all_gather_along", "broadcast"})
"""Collectives, by name without overload and `_coalesced`, whose result is equal on all devices of their mesh axis."""

SCATTER = frozenset({"reduce_scatter_tensor", "reduce_scatter_along", "all_to_all_single", "axis_index"})
"""The others: each device of the axis has a result of its own."""


class DialectError(ValueError):
    """A step does what a step graph cannot hold."""


def op_name(target: object) -> str:
    """`namespace.op.overload` of an op overload; the plain name of anything else."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def describe(node: torch.fx.Node) -> str:
    """A node for messages: its name, op, module and source line, as far as they are known."""
    op = op_name(node.target) if node.op == "call_function" else node.op
    return f"node {node.name} ({op}){location(node.meta.get('module_fqn'), node.meta.get('source'))}"


def location(module_fqn: str | None, source: str | None) -> str:
    """The end of a message: in which module and where, as far as they are known."""
    return (f" in module {module_fqn}" if module_fqn else "") + (f" at {source}" if source else "")


def group_argument(node: torch.fx.Node) -> int | None:
    """The position of the argument that names a collective's mesh axis; None for an op that does not communicate."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("_c10d_functional", "titan"):
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    return names.index("group_name") if "group_name" in names else None


def draws_random_numbers(node: torch.fx.Node) -> bool:
    """Whether an op's result depends on a global generator. An attention op with dropout 0 is as good as any other."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            if position < len(node.args):
                return node.args[position] != 0
            return node.kwargs.get("dropout_p", argument.default_value) != 0
    return True


def argument_key(value: object) -> Hashable:
    """A key that is equal for arguments that mean the same to an op.

    Python's own equality will not do: 1, 1.0 and True are equal and promote differently, 0.0 equals -0.0, and a NaN not
    even another NaN. Nodes are themselves.
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(argument_key, value))
    if isinstance(value, dict):
        return tuple((name, argument_key(entry)) for name, entry in sorted(value.items()))
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, complex):
        return (complex, value.real.hex(), value.imag.hex())
    if isinstance(value, (bool, int)):
        return (type(value), value)
    return value


def graphs_of(module: torch.fx.GraphModule) -> Iterator[torch.fx.Graph]:
    """The graph of a module and those of the bodies of its loops."""
    return (part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule))


def check_dialect(module: torch.fx.GraphModule) -> None:
    """Raises DialectError at the first node that the dialect does not admit, in the graph or in the body of a loop."""
    for graph in graphs_of(module):
        for node in graph.nodes:
            if node.op == "get_attr":
                _check_constant(graph.owning_module, node)
            elif node.op not in ("placeholder", "output"):
                _check_op(node)


def _check_op(node: torch.fx.Node) -> None:
    if node.op != "call_function":
        raise DialectError(f"{node.op} {node.target} is not an op")
    if node.target is operator.getitem:
        return
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        if node.target.name() != "scan":
            raise DialectError(f"{describe(node)}: the only higher-order op in a step is scan")
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        raise DialectError(f"{describe(node)}: is no op of PyTorch or of a library that is registered with it")
    if draws_random_numbers(node):
        raise DialectError(f"{describe(node)}: draws from a global generator; pass a counter-based key in the batch")
    if node.target._schema.is_mutable:
        raise DialectError(f"{describe(node)}: ops that write to their inputs are not admitted; return a new tensor")


def _check_constant(module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    value = operator.attrgetter(node.target)(module)
    if isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.is_meta):
        user = next(iter(node.users), node)
        raise DialectError(
            f"{describe(user)}: uses a tensor of shape {list(value.shape)} without values, which the step neither "
            "takes nor computes; pass it in the state or the batch"
        )
