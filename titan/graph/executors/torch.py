"""The torch executor: a StepGraph interpreted by PyTorch, one process a device. It is the reference for the others."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
import torch.fx
from torch.distributed.device_mesh import DeviceMesh

from titan.graph.dialect import group_argument
from titan.graph.step_graph import StepGraph
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class TorchExecutable:
    """An interpreted step.

    Attributes:
      graph: the captured step.
      module: its graph with the names of this process's process groups in place of mesh axes.
      device_mesh: the running mesh; None for one device.
    """

    graph: StepGraph
    module: torch.fx.GraphModule
    device_mesh: DeviceMesh | None

    def __call__(self, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
        """Runs one step on this rank's shards; returns the new state (empty for a step that only reads it) and the metrics."""
        graph = self.graph
        with torch.no_grad():
            outputs = self.module(*(state[name] for name in graph.state), *(batch[name] for name in graph.batch))
        num_state = len(graph.state) if graph.updates_state else 0
        return dict(zip(graph.state, outputs[:num_state])), dict(zip(graph.metrics, outputs[num_state:]))

    def place(self, batch: Mapping[str, np.ndarray]) -> Tensors:
        """This rank's part of a global batch."""
        return {
            name: local_shard(torch.as_tensor(batch[name]), layout, self.graph.mesh, self.device_mesh)
            for name, layout in self.graph.batch.items()
        }


def local_shard(tensor: torch.Tensor, layout: TensorLayout, spec: MeshSpec, mesh: DeviceMesh | None) -> torch.Tensor:
    """This rank's shard of a global tensor."""
    for axis, (placement, size) in enumerate(zip(layout.placements, spec.axis_sizes)):
        if placement.is_shard():
            tensor = tensor.chunk(size, placement.dim)[mesh.get_local_rank(axis)]
    return tensor.contiguous()


def compile_torch(graph: StepGraph, device_mesh: DeviceMesh | None) -> TorchExecutable:
    """Binds a step's mesh axes to the process groups of a running mesh.

    Args:
      device_mesh: a mesh of the graph's axes and sizes, or None where the graph has no axis.

    Raises:
      ValueError: the running mesh is not the one that the graph was captured for.
    """
    running = MeshSpec(tuple(device_mesh.mesh_dim_names), tuple(device_mesh.shape)) if device_mesh else MeshSpec((), ())
    if running != graph.mesh:
        raise ValueError(f"the step was captured for the mesh {graph.mesh}, and the running mesh is {running}")
    module = torch.fx.GraphModule(graph.module, torch.fx.Graph())
    environment: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.module.graph.nodes:
        copied = environment[node] = module.graph.node_copy(node, lambda argument: environment[argument])
        position = group_argument(node)
        if position is not None:
            copied.update_arg(position, device_mesh.get_group(node.args[position]).group_name)
    module.recompile()
    return TorchExecutable(graph, module, device_mesh)
