"""Assigns each mesh axis a sub-box of the torus: dims, or parts of them.

The inner axes, which communicate most, lie closest: a group of the innermost one is a box of adjacent chips, and the
groups of the next are such boxes' chips of equal place. All ways to divide the dims are compared by the model of
`link_load`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from titan.parallel.tpu_topology.link_load import RingLoad, axis_share, ring_load, rings_of, step_time
from titan.parallel.tpu_topology.ring import closed_rings
from titan.parallel.tpu_topology.torus import Point, Torus

_CUBE = (4, 4, 4)
"""The chips that 3D generations join by copper; slices of several such cubes are joined by optical switches."""


@dataclasses.dataclass(frozen=True)
class AxisPlacement:
    """What a mesh axis takes of the slices. Its size is the product of all.

    Attributes:
      num_slices: slices.
      extent: chips along each dim.
      stride: chips from one to the next along each dim: what the axes further in take of it.
      cores: devices of each chip.
      chips: of one group, in units of `stride`, in the order of the axis.
    """

    num_slices: int
    extent: tuple[int, ...]
    stride: tuple[int, ...]
    cores: int
    chips: tuple[Point, ...]


def place_axes(
    torus: Torus, sizes: tuple[int, ...], cubes: bool, replica: int | None = None
) -> tuple[AxisPlacement, ...]:
    """The placements of the least modelled time.

    Args:
      torus: the slices.
      sizes: of the mesh axes, outermost first.
      cubes: see `topology.assign`.
      replica: the axis that, with those further in, is one replica; None: the innermost that has several chips.

    Raises:
      ValueError: the mesh has another number of devices, or slices or the devices of a chip do not divide the axes.
    """
    if math.prod(sizes) != torus.num_devices:
        raise ValueError(f"a mesh of {' x '.join(map(str, sizes))} devices for {torus.num_devices}")
    slices = _slices(sizes, torus.num_slices)
    within = [size // count for size, count in zip(sizes, slices, strict=True)]
    holders = [axis for axis, size in enumerate(within) if size % torus.devices_per_chip == 0]
    if not holders:
        raise ValueError(
            f"the {torus.devices_per_chip} devices of a chip divide no axis of {' x '.join(map(str, within))}"
        )
    # The devices of a chip are neighbours along the innermost axis, unless another makes more of them.
    found = [_place(torus, sizes, slices, holder, cubes, replica) for holder in reversed(holders)]
    return min(found, key=lambda option: option[0])[1]


def _place(
    torus: Torus, sizes: tuple[int, ...], slices: Sequence[int], holder: int, cubes: bool, replica: int | None
) -> tuple[Fraction, tuple[AxisPlacement, ...]]:
    """The best placements, and the modelled cost of them, if the axis `holder` has all devices of a chip."""
    cores = [torus.devices_per_chip if axis == holder else 1 for axis in range(len(sizes))]
    chips = [size // count // own for size, count, own in zip(sizes, slices, cores, strict=True)]
    if replica is None:
        replica = max((axis for axis, count in enumerate(chips) if count > 1), default=0)
    cube_axis = replica if cubes and _of_cubes(torus.shape, math.prod(chips[replica:])) else None

    @functools.cache
    def best(axis: int, free: tuple[int, ...]) -> tuple[tuple[Fraction, ...], tuple[AxisPlacement, ...]]:
        """Places this axis and those further out on what is `free` of each dim; cost and placements."""
        if axis < 0:
            return (Fraction(), Fraction(), Fraction()), ()
        stride = tuple(size // part for size, part in zip(torus.shape, free, strict=True))
        found = []
        for extent in _extents(free, chips[axis]):
            left = tuple(size // part for size, part in zip(free, extent, strict=True))
            if axis == cube_axis and tuple(size // part for size, part in zip(torus.shape, left, strict=True)) != _CUBE:
                continue
            group, load = _chips(torus, extent, stride, cores[axis])
            outer_cost, outer = best(axis - 1, left)
            # Then shorter ways, then whole dims, along all of which at once a compiler may send.
            split = sum(1 < part < size for part, size in zip(extent, torus.shape, strict=True))
            costs = (step_time(load), Fraction(load.mean_hops), Fraction(split))
            share = axis_share(sizes, axis)
            cost = tuple(share * own + others for own, others in zip(costs, outer_cost, strict=True))
            found.append((cost, (*outer, AxisPlacement(slices[axis], extent, stride, cores[axis], group))))
        return min(found, key=lambda option: option[0], default=((math.inf, math.inf, math.inf), ()))

    cost, placements = best(len(sizes) - 1, torus.shape)
    return cost[0], placements


def _slices(sizes: tuple[int, ...], num_slices: int) -> list[int]:
    """The slices that lie along each axis."""
    counts = []
    left = num_slices
    for size in sizes:
        counts.append(math.gcd(size, left))
        left //= counts[-1]
        if left > 1 and counts[-1] < size:
            raise ValueError(f"an axis of {size} outermost, over {num_slices} slices: neither divides the other")
    return counts


def _of_cubes(shape: tuple[int, ...], num_chips: int) -> bool:
    """Whether so many chips can be one of several cubes of the slice."""
    return (
        len(shape) == len(_CUBE)
        and num_chips == math.prod(_CUBE) < math.prod(shape)
        and all(size % side == 0 for size, side in zip(shape, _CUBE, strict=True))
    )


def _extents(free: tuple[int, ...], num_chips: int) -> Iterator[tuple[int, ...]]:
    """All boxes of so many chips whose sides divide what is free."""
    if not free:
        if num_chips == 1:
            yield ()
        return
    for part in range(1, free[0] + 1):
        if free[0] % part == 0 and num_chips % part == 0:
            for rest in _extents(free[1:], num_chips // part):
                yield (part, *rest)


@functools.lru_cache(maxsize=4096)
def _chips(
    torus: Torus, extent: tuple[int, ...], stride: tuple[int, ...], cores: int
) -> tuple[tuple[Point, ...], RingLoad]:
    """The order of a box's chips that costs least, and the load when all groups communicate."""
    wraps = [
        wrap and part * step == size
        for wrap, part, step, size in zip(torus.wraps, extent, stride, torus.shape, strict=True)
    ]
    copies = torus.devices_per_chip // cores
    dims = [dim for dim, part in enumerate(extent) if part > 1]
    if len(dims) > 1 and all(wraps[dim] and stride[dim] == 1 for dim in dims):
        nested = tuple(itertools.product(*map(range, extent)))
        rings = rings_of(torus, _devices(nested, cores))
        return nested, ring_load(dict.fromkeys(rings, copies), extent, wraps, stride)
    found = []
    for ring in closed_rings(extent, wraps):
        found.append((tuple(ring), ring_load({_devices(ring, cores): copies}, extent, wraps, stride)))
    return min(found, key=lambda option: (step_time(option[1]), option[1].mean_hops))


def _devices(chips: Iterable[Point], cores: int) -> tuple[Point, ...]:
    """The chip of each device."""
    return tuple(chip for chip in chips for _ in range(cores))
