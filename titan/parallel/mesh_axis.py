"""One axis of a mesh as what a module that communicates along it needs to know: plain names and numbers."""

import dataclasses

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan.parallel import axis_index  # noqa: F401  (registers titan::axis_index)


@dataclasses.dataclass(frozen=True)
class MeshAxis:
    """An axis of the running, or of the captured, mesh.

    Attributes:
      name: as in the mesh.
      size: devices along it.
      group_name: the process group of this rank along it, by the name that functional collectives take.
    """

    name: str
    size: int
    group_name: str

    def index(self) -> torch.Tensor:
        """This rank's coordinate: a 0-d int32 tensor (see `titan.parallel.axis_index`)."""
        return torch.ops.titan.axis_index(self.group_name)


def mesh_axes(mesh: DeviceMesh) -> dict[str, MeshAxis]:
    """All axes of a mesh, by name."""
    return {
        name: MeshAxis(name, mesh.size(dim), mesh.get_group(name).group_name)
        for dim, name in enumerate(mesh.mesh_dim_names)
    }
