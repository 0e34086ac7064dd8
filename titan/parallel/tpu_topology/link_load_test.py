"""Hops and loads of rings whose routes can be counted by hand."""

import pytest

from titan.parallel.tpu_topology.link_load import RingLoad, axis_loads, modelled_time, ring_load, rings_of
from titan.parallel.tpu_topology.torus import Torus, row_major

_LINE = tuple((x,) for x in range(4))


@pytest.mark.parametrize(
    ("ring", "wraps", "expected"),
    [
        (_LINE, True, RingLoad(1, 1.0, 1)),
        # The edge that closes it goes back over the three others, each way round.
        (_LINE, False, RingLoad(3, 1.5, 2)),
        (((0,), (2,), (3,), (1,)), False, RingLoad(2, 1.5, 2)),
        # To the opposite chip and back: one direction over each half.
        (((0,), (2,)), True, RingLoad(2, 2.0, 1)),
        (((0,), (2,)), False, RingLoad(2, 2.0, 2)),
        # Two devices of each of two chips: every second edge is within a chip.
        (((0,), (0,), (1,), (1,)), False, RingLoad(1, 0.5, 2)),
        (((0,), (0,)), False, RingLoad(0, 0.0, 0)),
    ],
)
def test_one_ring(ring, wraps, expected):
    assert ring_load({ring: 1}, (4,), (wraps,)) == expected


def test_rings_side_by_side_load_links_as_their_stride_says():
    # Chips 0, 3, 6, 9 of a dim of 12 form a ring, and so do the two rows of chips beside them.
    rings = {tuple((x + 3 * unit, 0) for unit in range(4)): 1 for x in range(3)}
    assert ring_load(rings, (12, 2), (True, False)) == RingLoad(3, 3.0, 3)
    unit = {tuple((unit, 0) for unit in range(4)): 1}
    assert ring_load(unit, (4, 2), (True, False), stride=(3, 1)) == RingLoad(3, 3.0, 3)


def test_axes_of_a_mesh_in_row_major_order():
    torus = Torus((4, 2), (False, False))
    loads = axis_loads(torus, {"rows": 2, "columns": 4}, row_major(torus))
    assert loads == (RingLoad(1, 1.0, 2), RingLoad(3, 1.5, 2))
    # Half of a quarter along the rows, three quarters along the columns.
    assert modelled_time((2, 4), loads) == pytest.approx(1 / 8 * (2 + 0.1) + 3 / 4 * (2 + 0.3))


def test_an_axis_over_several_slices_forms_a_ring_in_each():
    torus = Torus((2, 2), (False, False), num_slices=3)
    (load,) = axis_loads(torus, {"all": 12}, row_major(torus))
    # 00 10 01 11: two edges of one hop, two across, of two.
    assert load == RingLoad(2, 1.5, 2)


def test_a_group_of_whole_joined_dims_in_nested_order_is_a_ring_along_each():
    torus = Torus((4, 4, 8), (True, True, True), 2)
    plane = [(x, 3, z) for z in range(8) for x in range(4)]
    along_x = [tuple((x, 3, z) for x in range(4)) for z in range(8)]
    along_z = [tuple((x, 3, z) for z in range(8)) for x in range(4)]
    assert sorted(rings_of(torus, plane)) == sorted(along_x + along_z)
    assert ring_load(dict.fromkeys(rings_of(torus, plane), 2), torus.shape, torus.wraps) == RingLoad(1, 1.0, 2)
    both = [chip for chip in plane for _ in range(2)]  # of each chip both devices
    assert sorted(rings_of(torus, both)) == sorted(tuple(c for c in ring for _ in "01") for ring in along_x + along_z)
    for group in (plane[::-1], plane[:16], [(x, 0, 0) for x in range(4)]):  # another order, a part, one dim
        assert rings_of(torus, group) == [tuple(group)]
    open_ends = Torus((4, 4, 8), (True, True, False), 2)
    assert rings_of(open_ends, plane) == [tuple(plane)]
