"""What collectives along rings ask of the links of a torus: hops between neighbours, and the load of the busiest link.

A ring collective over N devices sends half of its bytes each way round: over each of the N edges, in each direction,
(N-1)/(2N) of the bytes that a device ends up with (all-gather) or puts in (reduce-scatter), twice that for an
all-reduce. Between chips that are not neighbours they take the shortest way, dim by dim. The link load is the number
of such edges that the busiest link carries in one direction when all groups of a mesh axis communicate at once.

A group that fills several dims whose ends are joined, in nested order, is a ring along each dim: XLA:TPU sends along
all of them at once, first through one dim and then through the others.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from titan.parallel.tpu_topology.torus import DevicePosition, Point, Torus

_HOP = Fraction(1, 10)
"""Latency of a hop against the time of a chunk on a link: about 1 us, and 1 MB at 100 GB/s."""


@dataclasses.dataclass(frozen=True)
class RingLoad:
    """Of rings that are all in use at once.

    Attributes:
      max_hops: links between neighbours of a ring, the last and the first among them, at most. 0 within a chip.
      mean_hops: on average.
      link_load: ring edges over the busiest link, in one direction. 1 is the least for more than two chips.
    """

    max_hops: int
    mean_hops: float
    link_load: int


def ring_load(
    rings: Mapping[tuple[Point, ...], int],
    shape: Sequence[int],
    wraps: Sequence[bool],
    stride: Sequence[int] | None = None,
) -> RingLoad:
    """Routes every edge of every ring, both ways round, over a torus.

    Args:
      rings: the chips of each ring, in order, and how many rings there are of it. A chip with several devices in the
        ring stands there as often.
      shape: chips along each dim.
      wraps: dims whose ends are joined.
      stride: for rings of chips that lie apart, `shape` and coordinates being in units of these distances. As many
        rings lie side by side, and their edges pass over the same links.
    """
    stride = stride or [1] * len(shape)
    loads: collections.Counter[tuple[Point, int, int]] = collections.Counter()
    max_hops, total_hops, num_edges = 0, 0, 0
    for ring, count in rings.items():
        for start, end in zip(ring, (*ring[1:], ring[0]), strict=True):
            num_edges += count
            hops = 0
            for link in _route(start, end, shape, wraps, 1):
                loads[link] += count
                hops += stride[link[1]]
            for link in _route(end, start, shape, wraps, -1):
                loads[link] += count
            max_hops = max(max_hops, hops)
            total_hops += hops * count
    load = max((count * stride[dim] for (_, dim, _), count in loads.items()), default=0)
    return RingLoad(max_hops, total_hops / num_edges, load)


def axis_loads(torus: Torus, axes: Mapping[str, int], order: Sequence[DevicePosition]) -> tuple[RingLoad, ...]:
    """What each mesh axis asks of the links of a slice if the mesh takes the devices in a given order.

    Groups over several slices form a ring in each: reductions go within slices first and then between them.
    """
    sizes = tuple(axes.values())
    loads = []
    for axis in range(len(sizes)):
        rings: dict[int, collections.Counter[tuple[Point, ...]]] = collections.defaultdict(collections.Counter)
        for group in axis_groups(sizes, axis, order):
            members: dict[int, list[Point]] = collections.defaultdict(list)
            for device in group:
                members[device.slice_index].append(device.coords)
            for index, chips in members.items():
                rings[index].update(rings_of(torus, chips))
        different = {frozenset(counts.items()): counts for counts in rings.values()}  # slices mostly are alike
        each = [ring_load(counts, torus.shape, torus.wraps) for counts in different.values()]
        loads.append(
            RingLoad(
                max(load.max_hops for load in each),
                max(load.mean_hops for load in each),
                max(load.link_load for load in each),
            )
        )
    return tuple(loads)


def rings_of(torus: Torus, group: Sequence[Point]) -> list[tuple[Point, ...]]:
    """The rings through a group's chips: one in the order of the group, or those along each of the dims that it fills.

    Args:
      torus: the slices.
      group: the chips of devices of one slice in order.
    """
    chips = tuple(dict.fromkeys(group))
    dims = [dim for dim, along in enumerate(zip(*chips, strict=True)) if len(set(along)) > 1]
    fills = all(torus.wraps[dim] for dim in dims) and len(chips) == math.prod(torus.shape[dim] for dim in dims)
    if len(dims) < 2 or not fills or not any(_is_nested(chips, order) for order in itertools.permutations(dims)):
        return [tuple(group)]
    rings: dict[tuple[int, Point], list[Point]] = collections.defaultdict(list)
    for chip in group:
        for dim in dims:
            rings[dim, (*chip[:dim], 0, *chip[dim + 1 :])].append(chip)
    return [tuple(ring) for ring in rings.values()]


def _is_nested(chips: Sequence[Point], dims: Sequence[int]) -> bool:
    keys = [tuple(chip[dim] for dim in dims) for chip in chips]
    return keys == sorted(keys)


def axis_groups(sizes: Sequence[int], axis: int, order: Sequence[DevicePosition]) -> Iterator[Sequence[DevicePosition]]:
    """The devices that communicate along one axis of a mesh of these sizes, group by group, in the axis' order."""
    inner = math.prod(sizes[axis + 1 :])
    whole = inner * sizes[axis]
    for outer in range(0, len(order), whole):
        for first in range(outer, outer + inner):
            yield order[first : outer + whole : inner]


def modelled_time(sizes: Sequence[int], loads: Sequence[RingLoad]) -> float:
    """The time of one ring collective along each axis, in units of a link's time for one device's whole array.

    An axis communicates what the axes further in leave of the array, as gradients in HSDP. In each of its steps the
    busiest link carries `link_load` chunks, and the farthest neighbour is `max_hops` away.
    """
    return float(sum(axis_share(sizes, axis) * step_time(load) for axis, load in enumerate(loads)))


def axis_share(sizes: Sequence[int], axis: int) -> Fraction:
    """The part of the array that a device gets along one axis: what the axes further in leave, less its own piece."""
    return Fraction(sizes[axis] - 1, math.prod(sizes[axis:]))


def step_time(load: RingLoad) -> Fraction:
    """The time of one step of a ring, in that of a chunk over a link."""
    return load.link_load + _HOP * load.max_hops


def _route(
    start: Point, end: Point, shape: Sequence[int], wraps: Sequence[bool], tie: int
) -> Iterator[tuple[Point, int, int]]:
    """The links of the way, as chip, dim and direction; of two ways of equal length the one in the direction `tie`."""
    at = list(start)
    for dim, size in enumerate(shape):
        distance = end[dim] - at[dim]
        if not distance:
            continue
        direction = 1 if distance > 0 else -1
        if wraps[dim] and 2 * abs(distance) >= size:
            direction = tie if 2 * abs(distance) == size else -direction
        while at[dim] != end[dim]:
            yield tuple(at), dim, direction
            at[dim] = (at[dim] + direction) % size
