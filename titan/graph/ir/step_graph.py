"""StepGraph: one captured step as a functional FX graph, with the layout of everything that goes in and comes out."""

import dataclasses
import operator

import torch
import torch.fx

from titan.graph._compat import LazyGraphModule
from titan.graph.ir.dialect import op_name
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """A whole step (training or evaluation) of one rank, equal for all ranks.

    The graph is flat: a placeholder for each entry of `state`, then of `batch`, in order; its one output is the tuple
    of the new state, in the same order, and then the metrics. It is in the dialect that
    `titan.graph.ir.dialect` checks, and collectives name mesh axes.

    Attributes:
      module: the graph. Every op has `meta["val"]` (a FakeTensor of this rank's shape, or a tuple of them),
        `meta["module_fqn"]`, `meta["region"]` and `meta["source"]` ("file:line" of the code), the last three empty
        where not known; an input has `meta["leaf"]`, its name in `state` or `batch`.
      mesh: the mesh that it was captured for, without trivial axes.
      state: name to layout of what persists from step to step.
      batch: name to layout of what each call supplies.
      metrics: name to layout of what each call reports; all replicated.
      updates_state: whether the outputs begin with a new state. An evaluation step only reads it.
    """

    module: torch.fx.GraphModule
    mesh: MeshSpec
    state: dict[str, TensorLayout]
    batch: dict[str, TensorLayout]
    metrics: dict[str, TensorLayout]
    updates_state: bool

    @property
    def num_ops(self) -> int:
        """Nodes that compute something."""
        return sum(node.op == "call_function" for node in self.module.graph.nodes)

    def copy(self) -> "StepGraph":
        """A copy whose graph may be edited. Node metadata is copied; constants and metadata values are shared."""
        return dataclasses.replace(self, module=_copy_module(self.module))

    def text(self) -> str:
        """The graph as readable text, one op a line with shape, region, module and source; then the loops' bodies."""
        return _text(self.module)


def _text(module: torch.fx.GraphModule) -> str:
    lines = [_line(node) for node in module.graph.nodes]
    bodies = [f"\n{name}:\n{_text(body)}" for name, body in module.named_children()]
    return "\n".join(lines) + "\n" + "".join(bodies)


def _copy_module(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    # Lazy: its Python code, which costs more than the copy, is made from the graph as it is when it is first called.
    copy = LazyGraphModule(module, graph)
    for node in graph.find_nodes(op="get_attr"):
        body = operator.attrgetter(node.target)(module)
        if isinstance(body, torch.fx.GraphModule):
            copy.set_submodule(node.target, _copy_module(body))
    return copy


def _line(node: torch.fx.Node) -> str:
    shape = _shape(node.meta.get("val"))
    keys = ("region", "module_fqn", "source", "memory_policy")
    where = " ".join(str(node.meta[key]) for key in keys if node.meta.get(key))
    comment = f"  # {where}" if where else ""
    if node.op == "placeholder":
        return f"%{node.name}: {shape} = input {node.meta.get('leaf', '')}"
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    if node.op == "get_attr":
        return f"%{node.name}: {shape} = constant {node.target}"
    args = ", ".join([*map(_argument, node.args), *(f"{key}={_argument(value)}" for key, value in node.kwargs.items())])
    return f"%{node.name}: {shape} = {op_name(node.target)}({args}){comment}"


def _shape(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "(" + ", ".join(map(_shape, value)) + ")" if isinstance(value, (list, tuple)) else str(value)


def _argument(value: object) -> str:
    if isinstance(value, torch.fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_argument, value)) + "]"
    return str(value)
