"""StepGraph: one captured step as a functional FX graph, with the layout of everything that goes in and comes out."""

import dataclasses

import torch.fx

from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """A whole step (training or evaluation) of one rank, equal for all ranks.

    The graph is flat: a placeholder for each entry of `state`, then of `batch`, in order; its one output is the tuple of
    the new state, in the same order, and then the metrics. It is in the dialect that `titan.graph.dialect` checks, and
    collectives name mesh axes.

    Attributes:
      module: the graph; every node has `meta["val"]` (a FakeTensor of this rank's shape), `meta["module_fqn"]`,
        `meta["region"]` and, where known, `meta["source"]` ("file:line" of the model's code).
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

    def text(self) -> str:
        """The graph as readable text, one op a line with shape, region, module and source."""
        return "\n".join(_line(node) for node in self.module.graph.nodes) + "\n"


def _line(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    shape = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if hasattr(value, "dtype") else ""
    where = " ".join(str(node.meta[key]) for key in ("region", "module_fqn", "source") if node.meta.get(key))
    comment = f"  # {where}" if where else ""
    if node.op == "placeholder":
        return f"%{node.name}: {shape} = input {node.meta.get('leaf', '')}"
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op == "get_attr":
        return f"%{node.name}: {shape} = constant {node.target}"
    args = ", ".join([*map(_argument, node.args), *(f"{key}={_argument(value)}" for key, value in node.kwargs.items())])
    return f"%{node.name}: {shape} = {node.target}({args}){comment}"


def _argument(value: object) -> str:
    if isinstance(value, torch.fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_argument, value)) + "]"
    return str(value)
