"""The torch executor: a StepGraph interpreted by PyTorch, one process a device. It is the reference for the others."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.fx
from torch.distributed.device_mesh import DeviceMesh

from titan.graph.ir.dialect import graphs_of, group_argument
from titan.graph.ir.step_graph import StepGraph
from titan.graph.ir.transfers import remove_transfers
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass
class TorchExecutable:
    """A step to interpret.

    Attributes:
      graph: the captured step.
      device_mesh: gives the running mesh, of the graph's axes and sizes (None for one device). It is asked when the
        first batch is placed and not before: capture needs a process without a process group, and other steps may still
        have to be captured.
    """

    graph: StepGraph
    device_mesh: Callable[[], DeviceMesh | None]

    def __call__(self, state: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
        """Runs one step on this rank's shards; returns the new state (empty if the step only reads it) and the metrics.

        Raises:
          ValueError: the running mesh is not the one that the graph was captured for.
        """
        graph = self.graph
        with torch.no_grad():
            outputs = self._module(*(state[name] for name in graph.state), *(batch[name] for name in graph.batch))
        num_state = len(graph.state) if graph.updates_state else 0
        return dict(zip(list(graph.state)[:num_state], outputs[:num_state], strict=True)), dict(
            zip(graph.metrics, outputs[num_state:], strict=True)
        )

    def place(self, batch: Mapping[str, np.ndarray]) -> Tensors:
        """This process's part of its rows of the global batch as tensors."""
        mesh = self.device_mesh()
        return place_local(batch, self.graph.batch, self.graph.mesh, mesh.get_rank() if mesh else 0)

    @functools.cached_property
    def _module(self) -> torch.fx.GraphModule:
        return _bind(self.graph, self.device_mesh())


def place_local(
    batch: Mapping[str, np.ndarray], layouts: Mapping[str, TensorLayout], spec: MeshSpec, rank: int
) -> Tensors:
    """A rank's tensors of a batch, of which a process reads its own rows and, of what else is split, everything."""
    return {name: torch.as_tensor(_own_part(array, layouts[name], spec, rank)) for name, array in batch.items()}


def _own_part(array: np.ndarray, layout: TensorLayout, spec: MeshSpec, rank: int) -> np.ndarray:
    coordinate = dict(zip(spec.axis_names, _coordinates(rank, spec), strict=True))
    for dim, axes in enumerate(layout.axes_by_dim(spec)):
        size = layout.local_shape(spec)[dim]
        if array.shape[dim] != size:
            sizes = tuple(map(spec.size, axes))
            index = int(np.ravel_multi_index(tuple(coordinate[axis] for axis in axes), sizes))
            array = np.take(array, range(index * size, (index + 1) * size), axis=dim)
    return array


def local_shard(tensor: torch.Tensor, layout: TensorLayout, spec: MeshSpec, rank: int) -> torch.Tensor:
    """A rank's shard of a global tensor."""
    coordinates = _coordinates(rank, spec)
    for placement, size, index in zip(layout.placements, spec.axis_sizes, coordinates, strict=True):
        if placement.is_shard():
            tensor = tensor.chunk(size, placement.dim)[index]
    return tensor.clone(memory_format=torch.contiguous_format)  # a view would keep the global tensor in memory


def _bind(graph: StepGraph, device_mesh: DeviceMesh | None) -> torch.fx.GraphModule:
    """The graph with the names of running process groups in place of mesh axes, and without transfers."""
    running = MeshSpec(tuple(device_mesh.mesh_dim_names), tuple(device_mesh.shape)) if device_mesh else MeshSpec((), ())
    if running != graph.mesh:
        raise ValueError(f"the step was captured for the mesh {graph.mesh}, and the running mesh is {running}")
    module = graph.copy().module
    remove_transfers(module)  # on the CPU, where this runs, host memory is all there is
    for part in graphs_of(module):
        for node in part.nodes:
            position = group_argument(node)
            if position is not None:
                node.update_arg(position, device_mesh.get_group(node.args[position]).group_name)
    return module


def _coordinates(rank: int, spec: MeshSpec) -> tuple[int, ...]:
    """Where a rank is along each axis of the mesh."""
    return tuple(map(int, np.unravel_index(rank, spec.axis_sizes))) if spec.axis_sizes else ()
