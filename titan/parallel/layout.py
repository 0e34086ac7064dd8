"""How one global tensor lies over a mesh: its global shape, and one DTensor placement per mesh axis."""

import dataclasses
import math

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from titan.parallel.mesh import MeshSpec


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """A global tensor's shape, dtype and placements.

    Attributes:
      shape: the global shape.
      dtype: the element type.
      placements: torch's own `Replicate()` or `Shard(dim)`, one for each axis of the mesh, outermost first. Two axes
        may shard the same dim, the outer axis in larger pieces.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...] = ()

    def local_shape(self, mesh: MeshSpec) -> tuple[int, ...]:
        """The shape of one device's shard.

        Raises:
          ValueError: axes do not divide the dim that they shard, or the placements do not fit the tensor or the mesh.
        """
        local = list(self.shape)
        for dim, names in enumerate(self.axes_by_dim(mesh)):
            num_shards = math.prod(map(mesh.size, names))
            if local[dim] % num_shards:
                axes = " x ".join(f"{name}={mesh.size(name)}" for name in names)
                raise ValueError(f"dim {dim} of shape {self.shape} is not divisible by its mesh axes {axes}")
            local[dim] //= num_shards
        return tuple(local)

    def stacked(self, length: int) -> "TensorLayout":
        """The layout of so many tensors of this one, stacked along a new first dim that no axis shards."""
        return TensorLayout((length, *self.shape), self.dtype, tuple(_moved(p, 1) for p in self.placements))

    def unstacked(self) -> "TensorLayout":
        """The layout of one entry along the first dim.

        Raises:
          ValueError: an axis shards the first dim.
        """
        if any(p.is_shard(0) for p in self.placements):
            raise ValueError(f"the first dim of {self} is sharded: no device has a whole entry's part")
        return TensorLayout(self.shape[1:], self.dtype, tuple(_moved(p, -1) for p in self.placements))

    def axes_by_dim(self, mesh: MeshSpec) -> tuple[tuple[str, ...], ...]:
        """For each tensor dim the mesh axes that shard it, outermost first: the form of `jax.sharding.PartitionSpec`.

        Raises:
          ValueError: the placements do not fit the tensor or the mesh.
        """
        if len(self.placements) != len(mesh.axis_names):
            raise ValueError(f"{len(self.placements)} placements for the mesh {mesh}")
        axes: list[list[str]] = [[] for _ in self.shape]
        for placement, name in zip(self.placements, mesh.axis_names, strict=True):
            if isinstance(placement, Shard):
                if not 0 <= placement.dim < len(self.shape):
                    raise ValueError(f"axis {name} shards dim {placement.dim} of a tensor of shape {self.shape}")
                axes[placement.dim].append(name)
            elif not isinstance(placement, Replicate):
                raise ValueError(f"a tensor at rest is sharded or replicated, not {placement!r}")
        return tuple(tuple(names) for names in axes)


def _moved(placement: Placement, offset: int) -> Placement:
    return Shard(placement.dim + offset) if isinstance(placement, Shard) else placement
