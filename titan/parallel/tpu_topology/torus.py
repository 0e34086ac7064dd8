"""TPU slices as tori of chips, and the places of devices in them."""

import dataclasses
import itertools
import math
from typing import NamedTuple

Point = tuple[int, ...]
"""Coordinates of a chip, one for each dim."""


class DevicePosition(NamedTuple):
    """A device of a slice.

    Attributes:
      slice_index: the slice among those that the data-centre network joins.
      coords: of the chip, one for each dim of the slice.
      core: the device among those of the chip.
    """

    slice_index: int
    coords: Point
    core: int


@dataclasses.dataclass(frozen=True)
class Torus:
    """Chips of equal slices and how they are joined.

    Attributes:
      shape: chips along each dim of one slice.
      wraps: dims whose ends are joined.
      devices_per_chip: JAX devices that one chip presents.
      num_slices: slices that the data-centre network joins.
    """

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    devices_per_chip: int = 1
    num_slices: int = 1

    @property
    def num_devices(self) -> int:
        """Of all slices."""
        return self.num_slices * math.prod(self.shape) * self.devices_per_chip


def row_major(torus: Torus) -> tuple[DevicePosition, ...]:
    """The devices by slice and chip, the first dim fastest, and within a chip: as libtpu numbers them."""
    chips = [coords[::-1] for coords in itertools.product(*map(range, torus.shape[::-1]))]
    return tuple(
        DevicePosition(index, coords, core)
        for index in range(torus.num_slices)
        for coords in chips
        for core in range(torus.devices_per_chip)
    )
