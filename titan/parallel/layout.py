"""How one global tensor lies over a mesh: its global shape, and one DTensor placement per mesh axis."""

import dataclasses

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from titan.parallel.mesh import MeshSpec


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """A global tensor's shape, dtype and placements.

    Attributes:
      shape: the global shape.
      dtype: the element type.
      placements: torch's own `Replicate()` or `Shard(dim)`, one for each axis of the mesh, outermost first. Two axes may
        shard the same dim, the outer axis in larger pieces.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...] = ()

    def local_shape(self, mesh: MeshSpec) -> tuple[int, ...]:
        """The shape of one device's shard.

        Raises:
          ValueError: an axis does not divide the dim that it shards, or the placements do not fit the mesh.
        """
        if len(self.placements) != len(mesh.axis_names):
            raise ValueError(f"{len(self.placements)} placements for the mesh {mesh}")
        local = list(self.shape)
        for placement, name, size in zip(self.placements, mesh.axis_names, mesh.axis_sizes):
            if isinstance(placement, Shard):
                if local[placement.dim] % size:
                    raise ValueError(
                        f"dim {placement.dim} of shape {self.shape} is not divisible by axis {name} of size {size}"
                    )
                local[placement.dim] //= size
            elif not isinstance(placement, Replicate):
                raise ValueError(f"a tensor at rest is sharded or replicated, not {placement}")
        return tuple(local)

    def axes_by_dim(self, mesh: MeshSpec) -> tuple[tuple[str, ...], ...]:
        """For each tensor dim the mesh axes that shard it, outermost first: the shape of a `jax.sharding.PartitionSpec`."""
        axes: list[list[str]] = [[] for _ in self.shape]
        for placement, name in zip(self.placements, mesh.axis_names):
            if isinstance(placement, Shard):
                axes[placement.dim].append(name)
        return tuple(tuple(names) for names in axes)
