"""The device mesh as data: named axes with sizes, independent of any running process group."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """Named mesh axes, outermost first.

    An axis of size 1 carries no communication, and a mesh without axes is one device; `without_trivial_axes` gives the
    mesh that programs are captured for.

    Attributes:
      axis_names: names such as `dp_replicate`, `dp_shard`.
      axis_sizes: devices along each axis.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axis_names) != len(self.axis_sizes):
            raise ValueError(f"{len(self.axis_names)} axis names for {len(self.axis_sizes)} axis sizes")
        if len(set(self.axis_names)) != len(self.axis_names):
            raise ValueError(f"mesh axis names must differ: {self.axis_names}")
        if any(size < 1 for size in self.axis_sizes):
            raise ValueError(
                f"mesh axis sizes must be at least 1: {dict(zip(self.axis_names, self.axis_sizes, strict=True))}"
            )

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return math.prod(self.axis_sizes)

    def size(self, axis_name: str) -> int:
        """Devices along one axis; 1 for an axis that the mesh does not have."""
        if axis_name not in self.axis_names:
            return 1
        return self.axis_sizes[self.axis_names.index(axis_name)]

    def without_trivial_axes(self) -> "MeshSpec":
        """This mesh less its axes of size 1."""
        kept = [(name, size) for name, size in zip(self.axis_names, self.axis_sizes, strict=True) if size > 1]
        return MeshSpec(tuple(name for name, _ in kept), tuple(size for _, size in kept))

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The DeviceMesh over the default process group, whose world size must be `num_devices`.

        Raises:
          ValueError: the world size differs, or the mesh has no axis.
        """
        if not self.axis_names:
            raise ValueError("a mesh without axes has no DeviceMesh")
        if dist.get_world_size() != self.num_devices:
            raise ValueError(f"the mesh has {self.num_devices} devices, the process group {dist.get_world_size()}")
        return init_device_mesh(device_type, self.axis_sizes, mesh_dim_names=self.axis_names)

    def __str__(self) -> str:
        return (
            " x ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.axis_sizes, strict=True))
            or "one device"
        )


@contextlib.contextmanager
def fake_world(spec: MeshSpec, rank: int = 0) -> Iterator[DeviceMesh | None]:
    """A process group of `spec.num_devices` ranks that communicates nothing, for tracing one rank's program.

    Args:
      spec: the mesh to build over the group; for a mesh without axes no group is made and None is given.
      rank: the rank that this process takes.

    Raises:
      RuntimeError: a default process group exists already.
      ValueError: the mesh has no such rank.
    """
    if not 0 <= rank < spec.num_devices:
        raise ValueError(f"the mesh {spec} has the ranks 0 to {spec.num_devices - 1}, not {rank}")
    if not spec.axis_names:
        yield None
        return
    if dist.is_initialized():
        raise RuntimeError("capture needs a process without a process group; destroy the running one first")
    from titan.parallel._compat import FakeStore, clear_dtensor_caches

    excepthook = sys.excepthook  # init_process_group replaces it by one that marks every later traceback with the rank
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spec.num_devices)
        yield spec.device_mesh("cpu")
    finally:
        # DTensor remembers the placements of results by the inputs' meshes, and equal meshes of two worlds are one key
        # to it: the next world's results would name the process groups of this one.
        clear_dtensor_caches()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = excepthook
