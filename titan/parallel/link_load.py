"""What collectives along rings ask of the links of a torus: hops between neighbours, and the load of the busiest link.

A ring collective over N devices sends half of its bytes each way round: over each of the N edges, in each direction,
(N-1)/(2N) of the bytes that a device ends up with (all-gather) or puts in (reduce-scatter), twice that for an
all-reduce. Between chips that are not neighbours they take the shortest way, dim by dim. The link load is the number
of such edges that the busiest link carries in one direction when all groups of a mesh axis communicate at once.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from titan.parallel.ring import Point


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
        for start, end in zip(ring, (*ring[1:], ring[0])):
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
