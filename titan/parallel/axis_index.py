"""The one source of rank-dependent values in a step: this rank's coordinate along a mesh axis, as an op.

Capture runs as a single rank, so a coordinate read as a Python number would be frozen into the program of all ranks.
The op stays in the graph and is evaluated on each device.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan.parallel._compat import resolve_process_group


@torch.library.custom_op("titan::axis_index", mutates_args=())
def _axis_index(group_name: str) -> torch.Tensor:
    return torch.tensor(dist.get_group_rank(resolve_process_group(group_name), dist.get_rank()), dtype=torch.int32)


@_axis_index.register_fake
def _(group_name: str) -> torch.Tensor:
    return torch.empty((), dtype=torch.int32)


def axis_index(mesh: DeviceMesh, axis_name: str) -> torch.Tensor:
    """This rank's coordinate along an axis of the mesh: a 0-d int32 tensor from 0 to the axis's size - 1."""
    return torch.ops.titan.axis_index(mesh.get_group(axis_name).group_name)
