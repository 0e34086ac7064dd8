"""Orders of devices: what they promise of any slice, and against jax.experimental.mesh_utils on existing slices."""

import dataclasses
import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import mesh_utils

from titan.core.hardware import HARDWARE
from titan.parallel.tpu_topology.link_load import axis_groups, axis_loads, modelled_time, ring_load, rings_of
from titan.parallel.tpu_topology.topology import assign
from titan.parallel.tpu_topology.topology_svg import to_svg
from titan.parallel.tpu_topology.topology_text import to_text
from titan.parallel.tpu_topology.torus import DevicePosition, Torus, row_major

# What libtpu calls devices; mesh_utils knows another name of the v5p.
_KINDS = {"v5e": ["TPU v5 lite"], "v6e": ["TPU v6 lite"], "v5p": ["TPU v5", "TPU v5p"], "tpu7x": ["TPU7x"]}


def _torus(generation, *shape, num_slices=1):
    hardware = HARDWARE[generation]
    return Torus(shape, hardware.wraps(shape), hardware.devices_per_chip, num_slices)


def _meshes(num_devices, num_axes):
    """All meshes of so many axes of two devices or more."""
    if num_axes == 1:
        yield (num_devices,)
        return
    for size in range(2, num_devices // 2 + 1):
        if num_devices % size == 0:
            for rest in _meshes(num_devices // size, num_axes - 1):
                yield (size, *rest)


def _named(sizes):
    return {f"axis{number}": size for number, size in enumerate(sizes)}


@st.composite
def _cases(draw):
    side = st.sampled_from([1, 2, 3, 4, 6, 8])
    shape = draw(st.tuples(side, side) | st.tuples(side, side, side))
    wraps = draw(st.tuples(*[st.booleans() for _ in shape]))
    torus = Torus(shape, wraps, draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 1, 2, 3])))
    left, sizes = math.prod(shape) * torus.devices_per_chip, []
    for _ in range(draw(st.integers(0, 2))):
        sizes.append(draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0])))
        left //= sizes[-1]
    sizes.append(left)
    return torus, [torus.num_slices * sizes[0], *sizes[1:]]


@settings(deadline=None, max_examples=150)
@given(_cases())
def test_any_torus_and_mesh(case):
    torus, sizes = case
    assignment = assign(torus, _named(sizes))
    assert sorted(assignment.order) == sorted(row_major(torus))  # each device once
    assert [device.slice_index for device in assignment.order] == sorted(
        device.slice_index for device in assignment.order
    )
    assert assignment == assign(torus, _named(sizes))  # every process of a run finds the same
    for size, one, load in zip(sizes, assignment.placements, assignment.loads, strict=True):
        assert one.num_slices * math.prod(one.extent) * one.cores == size
        # What the search reckons for one box is what is counted on the whole slice.
        wraps = [
            wrap and a * b == c for wrap, a, b, c in zip(torus.wraps, one.extent, one.stride, torus.shape, strict=True)
        ]
        devices = tuple(chip for chip in one.chips for _ in range(one.cores))
        apart = any(part > 1 and step > 1 for part, step in zip(one.extent, one.stride, strict=True))
        rings = [devices] if apart else rings_of(torus, devices)
        assert load == ring_load(
            dict.fromkeys(rings, torus.devices_per_chip // one.cores), one.extent, wraps, one.stride
        )
    chips = [math.prod(one.extent) for one in assignment.placements]
    if max(chips) > 1:
        last = max(axis for axis, count in enumerate(chips) if count > 1)
        assert math.prod(assignment.placements[last].stride) == 1  # adjacent chips


@pytest.mark.parametrize(
    ("torus", "sizes"),
    [
        (_torus("v6e", 2, 4), (8,)),
        (_torus("v5e", 16, 16), (16, 16)),
        (_torus("v5p", 2, 2, 1), (4,)),
        (_torus("v5p", 8, 8, 16), (1024,)),
        (_torus("v5p", 8, 8, 16), (16, 8, 8)),
        (_torus("tpu7x", 4, 4, 8), (8, 32)),
        (_torus("tpu7x", 4, 4, 8, num_slices=2), (2, 8, 32)),
    ],
)
def test_every_axis_is_a_ring_of_neighbours_where_the_shape_permits(torus, sizes):
    assignment = assign(torus, _named(sizes))
    for axis, one in enumerate(assignment.placements):
        load = assignment.loads[axis]
        groups_of_a_chip = torus.devices_per_chip // one.cores
        assert load.max_hops == (math.prod(one.extent) > 1)
        assert load.link_load == (groups_of_a_chip if load.max_hops else 0)


@pytest.mark.parametrize(
    ("torus", "sizes"),
    [
        (_torus("v5p", 4, 4, 8), (2, 64)),
        (_torus("v5p", 8, 8, 16), (16, 64)),
        (_torus("tpu7x", 4, 4, 8), (2, 128)),
        (_torus("tpu7x", 8, 8, 16, num_slices=4), (64, 128)),
        (_torus("tpu7x", 8, 8, 16, num_slices=4), (4, 16, 128)),
    ],
)
def test_shards_of_64_chips_are_cubes(torus, sizes):
    assignment = assign(torus, _named(sizes))
    groups = list(axis_groups(sizes, len(sizes) - 1, assignment.order))
    assert len(groups) == torus.num_devices // sizes[-1]
    for group in groups:
        assert len({device.slice_index for device in group}) == 1
        chips = sorted({device.coords for device in group})
        assert len(chips) == 64
        assert [max(along) - min(along) for along in zip(*chips, strict=True)] == [3, 3, 3]
        assert all(least % 4 == 0 for least in chips[0])
    assert assignment.loads[-1].max_hops == 1
    assert assignment.loads[-1].link_load == 1


@pytest.mark.parametrize(
    ("torus", "sizes"),
    [
        (_torus("tpu7x", 8, 8, 8), (8, 32, 4)),
        (_torus("tpu7x", 4, 4, 8), (2, 16, 8)),
        (_torus("v5p", 8, 8, 16), (16, 4, 4, 4)),
    ],
)
def test_several_axes_that_share_64_chips_have_a_cube_together(torus, sizes):
    assignment = assign(torus, {"dp_replicate": sizes[0], **_named(sizes[1:])})
    per_cube = torus.num_devices // sizes[0]
    for start in range(0, torus.num_devices, per_cube):
        chips = sorted({device.coords for device in assignment.order[start : start + per_cube]})
        assert len(chips) == 64
        assert [max(along) - min(along) for along in zip(*chips, strict=True)] == [3, 3, 3]


def test_the_devices_of_a_chip_are_neighbours_along_the_innermost_axis():
    for sizes in ((128,), (2, 64), (64, 2), (4, 4, 8)):
        order = assign(_torus("tpu7x", 4, 4, 4), _named(sizes)).order
        for first, second in zip(order[::2], order[1::2], strict=True):
            assert (first.coords, first.core, second.core) == (second.coords, 0, 1)


@pytest.mark.parametrize(
    ("torus", "sizes", "problem"),
    [
        (_torus("v6e", 2, 4), (4,), "a mesh of 4 devices for 8"),
        (_torus("v6e", 2, 4, num_slices=3), (2, 12), "an axis of 2 outermost, over 3 slices"),
        (Torus((3, 3), (False, False), 4), (6, 6), "the 4 devices of a chip divide no axis of 6 x 6"),
    ],
)
def test_what_does_not_fit(torus, sizes, problem):
    with pytest.raises(ValueError, match=problem):
        assign(torus, _named(sizes))


@dataclasses.dataclass(frozen=True)
class _Device:
    """What mesh_utils asks of a JAX device."""

    position: DevicePosition
    id: int
    device_kind: str
    platform: str = "tpu"

    def __getattr__(self, name: str) -> Any:
        found = {
            "coords": (*self.position.coords, 0)[:3],
            "core_on_chip": self.position.core,
            "slice_index": self.position.slice_index,
        }
        if name not in found:
            raise AttributeError(name)
        return found[name]


def _of_mesh_utils(torus, sizes, device_kind):
    devices = [_Device(position, number, device_kind) for number, position in enumerate(row_major(torus))]
    if torus.num_slices == 1:
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        within = [one.num_slices for one in assign(torus, _named(sizes)).placements]
        grid = mesh_utils.create_hybrid_device_mesh(
            [size // count for size, count in zip(sizes, within, strict=True)],
            within,
            devices,
            allow_split_physical_axes=True,
        )
    return [device.position for device in grid.flatten()]


_SLICES = [
    *[("v5e", *shape) for shape in ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))],
    *[("v6e", *shape) for shape in ((2, 2), (2, 4), (4, 4), (8, 16))],
    *[("v5p", *shape) for shape in ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8))],
    *[("tpu7x", *shape) for shape in ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8))],
]


@pytest.mark.parametrize("slice_", _SLICES, ids=lambda slice_: f"{slice_[0]}-{'x'.join(map(str, slice_[1:]))}")
def test_no_worse_than_mesh_utils(slice_):
    for num_slices in (1, 2):
        torus = _torus(*slice_, num_slices=num_slices)
        for num_axes in (1, 2, 3) if num_slices == 1 else (1, 2):
            for sizes in _meshes(torus.num_devices, num_axes):
                _compare(torus, sizes, _KINDS[slice_[0]])


@pytest.mark.parametrize("generation", ["v5p", "tpu7x"])
@pytest.mark.parametrize("sizes", [(-1,), (16, -1), (4, -1), (4, 16, -1), (2, -1, 8), (-1, 8)])
def test_no_worse_than_mesh_utils_on_8x8x16(generation, sizes):
    torus = _torus(generation, 8, 8, 16)
    rest = torus.num_devices // abs(math.prod(sizes))
    _compare(torus, tuple(rest if size == -1 else size for size in sizes), _KINDS[generation][:1])


def _compare(torus, sizes, device_kinds):
    axes = _named(sizes)
    free, cubes = (assign(torus, axes, cubes=cubes) for cubes in (False, True))
    ours = modelled_time(sizes, free.loads)
    assert ours <= modelled_time(sizes, free.naive_loads) + 1e-9, sizes
    if cubes != free:  # a choice that costs something, most where the replicas' groups share links
        assert (4, 4, 4) in [one.extent for one in cubes.placements]
        assert modelled_time(sizes, cubes.loads) <= 1.1 * ours, sizes
    for kind in device_kinds:
        theirs = axis_loads(torus, axes, _of_mesh_utils(torus, sizes, kind))
        assert ours <= modelled_time(sizes, theirs) + 1e-9, (sizes, kind)
        # The innermost axis, which communicates most, by each measure.
        for assignment in (free, cubes):
            assert assignment.loads[-1].link_load <= theirs[-1].link_load, (sizes, kind)
            assert assignment.loads[-1].max_hops <= theirs[-1].max_hops, (sizes, kind)


def test_text_and_picture_show_each_chip_and_ring():
    assignment = assign(_torus("tpu7x", 4, 4, 8), {"dp_replicate": 2, "dp_shard": 128})
    text = to_text(assignment)
    assert re.search(r"dp_replicate=2 +1x1x2 chips in steps of 1x1x4 +4, 4.00 +8 ", text)
    assert re.search(r"dp_shard=128 +4x4x4 chips x the 2 devices of a chip +1, 0.50 +1 ", text)
    places = re.findall(r"\b[01]\.\d+", text.partition("places on the mesh")[2])
    assert sorted(places) == sorted(f"{replica}.{place}" for replica in range(2) for place in range(0, 128, 2))
    root = ElementTree.fromstring(to_svg(assignment))
    numbers = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")][1:]
    assert numbers[:2] == ["0", "1"]  # of the first replicas
    assert sorted(map(int, numbers[3:])) == sorted([*range(64)] * 2)  # after a heading, two cubes


def test_text_and_picture_of_a_flat_slice():
    assignment = assign(_torus("v5e", 4, 4, num_slices=2), {"dp": 2, "tp": 16})
    assert "dp=2" in to_text(assignment) and "2 slices" in to_text(assignment)
    root = ElementTree.fromstring(to_svg(assignment))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) == 16  # one ring, of one hop each
