"""A digest of a graph, equal for graphs that compute the same by the same ops, whatever their nodes are called."""

import hashlib
import operator
from collections.abc import Iterator, Mapping

import torch
import torch.fx

from titan.graph.ir.dialect import op_name


def graph_digest(module: torch.fx.GraphModule) -> str:
    """SHA-256 of ops, arguments, shapes, dtypes, strides, constants and the bodies of loops.

    Names of nodes, and where in model and source code they come from, do not enter it.
    """
    digest = hashlib.sha256()
    for line in _lines(module):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _lines(module: torch.fx.GraphModule) -> Iterator[str]:
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        target = op_name(node.target) if node.op == "call_function" else ""
        if node.op == "get_attr":
            target = _attribute(operator.attrgetter(node.target)(module))
        yield f"{node.op} {target} {_text(node.args, numbers)} {_text(node.kwargs, numbers)} {_form(node)}"


def _attribute(value: torch.Tensor | torch.fx.GraphModule) -> str:
    if isinstance(value, torch.fx.GraphModule):
        return graph_digest(value)
    content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype}{tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"


def _form(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else [value]
    return " ".join(
        f"{part.dtype}{tuple(part.shape)}{part.stride()}" if isinstance(part, torch.Tensor) else str(part)
        for part in parts
    )


def _text(value: object, numbers: dict[torch.fx.Node, int]) -> str:
    if isinstance(value, torch.fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_text(entry, numbers) for entry in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}={_text(entry, numbers)}' for name, entry in value.items())}}}"
    return repr(value)
