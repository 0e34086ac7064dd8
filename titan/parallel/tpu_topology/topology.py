"""The order in which a mesh takes the devices of a TPU slice, so that its axes run along rings of the torus.

The ICI of a slice joins its chips as a mesh of two or three dims, whose ends are joined too where the slice is large
enough. `placement` gives each mesh axis a part of each dim, and so its groups a box of chips.

Within its box, an axis follows one closed ring, and so do collectives if their group takes a part of a dim: XLA:TPU
then sends them round in the order of the mesh. Boxes of several whole dims whose ends are joined are in nested order,
from which XLA:TPU makes a ring along each dim and uses all at once; on tpu7x it would not do so from one ring.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from titan.parallel.tpu_topology.link_load import RingLoad, axis_loads
from titan.parallel.tpu_topology.placement import AxisPlacement, place_axes
from titan.parallel.tpu_topology.torus import DevicePosition, Torus, row_major

_REPLICATE = "dp_replicate"
"""The axis whose devices are replicas of all that is further in."""


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The devices of a mesh, and what its axes ask of the links.

    Attributes:
      torus: the slices.
      axes: size of each mesh axis by name, outermost first.
      placements: of each axis.
      order: all devices in mesh order, the innermost axis fastest.
      loads: of each axis, within a slice, in this order.
      naive_loads: the same, were the devices taken in row-major order (see `row_major`).
    """

    torus: Torus
    axes: dict[str, int]
    placements: tuple[AxisPlacement, ...]
    order: tuple[DevicePosition, ...]
    loads: tuple[RingLoad, ...]
    naive_loads: tuple[RingLoad, ...]


def assign(torus: Torus, axes: Mapping[str, int], *, cubes: bool = True) -> Assignment:
    """Assigns the devices of slices to a mesh.

    Several slices lie along the outermost axis, or the outermost ones.

    Args:
      torus: the slices.
      axes: size of each mesh axis by name, outermost first.
      cubes: whether 64 chips of one replica are to be a cube of 4x4x4 where the slice consists of several: all axes
        inside `dp_replicate` together, or on a mesh without it the innermost axis. Such a cube is one ring. In slices
        with two dims of 8 a plane has the shorter modelled time: a ring along each of its dims, and replicas that are
        neighbours.

    Raises:
      ValueError: the mesh has another number of devices, or slices or the devices of a chip do not divide the axes.
    """
    names = list(axes)
    replica = names.index(_REPLICATE) + 1 if _REPLICATE in names[:-1] else None
    placements = place_axes(torus, tuple(axes.values()), cubes, replica)
    order = tuple(_order(placements))
    return Assignment(
        torus,
        dict(axes),
        placements,
        order,
        loads=axis_loads(torus, axes, order),
        naive_loads=axis_loads(torus, axes, row_major(torus)),
    )


def _order(placements: Sequence[AxisPlacement]) -> Iterator[DevicePosition]:
    along = [
        [(index, chip, core) for index in range(one.num_slices) for chip in one.chips for core in range(one.cores)]
        for one in placements
    ]
    for places in itertools.product(*along):
        slice_index, core = 0, 0
        coords = [0] * len(placements[0].extent)
        for one, (index, chip, own_core) in zip(placements, places, strict=True):
            slice_index = slice_index * one.num_slices + index
            core += own_core  # one axis has them all
            coords = [at + step * unit for at, step, unit in zip(coords, one.stride, chip, strict=True)]
        yield DevicePosition(slice_index, tuple(coords), core)
