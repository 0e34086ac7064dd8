"""Closed rings, over all shapes of up to three dims."""

import itertools
import math

import pytest

from titan.parallel.tpu_topology.ring import closed_rings


def _hops(start, end, sizes, wraps):
    apart = [abs(a - b) for a, b in zip(start, end, strict=True)]
    return sum(min(one, size - one) if wrap else one for one, size, wrap in zip(apart, sizes, wraps, strict=True))


def _ends(sizes):
    """Boxes of which no dim, one dim, and every dim has its ends joined."""
    return [(False,) * len(sizes), *itertools.product((False, True), repeat=len(sizes))]


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_rings_are_closed_with_one_hop_where_there_can_be_such_a_ring(num_dims):
    for sizes in itertools.product((1, 2, 3, 4, 5, 6), repeat=num_dims):
        for wraps in _ends(sizes):
            rings = list(closed_rings(sizes, wraps))
            assert rings
            long = [size for size in sizes if size > 1]
            most = []
            for ring in rings:
                assert sorted(ring) == sorted(itertools.product(*map(range, sizes)))
                most.append(
                    max(_hops(start, end, sizes, wraps) for start, end in zip(ring, ring[1:] + ring[:1], strict=True))
                )
            joined = [size for size, wrap in zip(sizes, wraps, strict=True) if wrap and size > 1]
            if len(long) > 1:
                # Steps of one hop alternate between the colours of a chessboard: an odd number of points has no closed
                # ring, unless an odd dim whose ends are joined breaks the pattern.
                possible = math.prod(sizes) % 2 == 0 or (len(long) == 2 and joined)
            else:
                possible = not long or long == [2] or bool(joined)
            assert min(most) == (math.prod(sizes) > 1 if possible else 2), (sizes, wraps)
