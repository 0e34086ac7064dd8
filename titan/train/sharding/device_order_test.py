"""The order of JAX's devices: of TPU slices, which libtpu describes, and where there is no order to find."""

import types

import jax
import pytest

from titan.core.config.validate import ConfigError
from titan.kernels.tpu_topology import topology_devices
from titan.parallel.mesh import MeshSpec
from titan.train.sharding.device_order import mesh_order


def _hops(devices):
    """Between neighbours of a ring on a slice without joined ends."""
    return [
        sum(abs(a - b) for a, b in zip(start.coords, end.coords, strict=True))
        for start, end in zip(devices, [*devices[1:], devices[0]], strict=True)
    ]


@pytest.mark.parametrize(("topology", "num_slices"), [("v6e:2x4", 1), ("tpu7x:2x2x1", 1), ("v6e:2x4", 2)])
def test_a_slice_is_a_ring(topology, num_slices):
    devices = topology_devices(topology, num_slices=num_slices)
    size = len(devices) // num_slices
    mesh = MeshSpec(("dp_replicate", "dp_shard"), (num_slices, size)).without_trivial_axes()
    ordered = mesh_order(devices, mesh)
    assert set(ordered) == set(devices) and len(ordered) == len(devices)
    assert max(_hops(devices[:size])) > 1  # as libtpu lists them it is none
    for first in range(0, len(devices), size):
        ring = ordered[first : first + size]
        assert max(_hops(ring)) == 1
        assert len({getattr(device, "slice_index", None) for device in ring}) == 1


def test_a_part_of_a_slice_may_lie_anywhere():
    devices = topology_devices("v6e:4x4")
    upper = [device for device in devices if device.coords[1] >= 2]
    ordered = mesh_order(upper, MeshSpec(("dp_shard",), (8,)))
    assert set(ordered) == set(upper) and max(_hops(ordered)) == 1


def test_devices_without_a_torus_keep_their_order():
    mesh = MeshSpec(("dp_shard",), (2,))
    cpu = [types.SimpleNamespace(device_kind="cpu") for _ in range(2)]
    assert mesh_order(cpu, mesh) == cpu
    devices = list(topology_devices("v6e:2x4"))
    assert mesh_order(devices, mesh) == devices  # more than the mesh has
    with_hole = [devices[0], devices[3]]
    assert mesh_order(with_hole, mesh) == with_hole
    assert mesh_order(jax.devices()[:1], MeshSpec((), ())) == jax.devices()[:1]


def test_slices_that_do_not_divide_the_mesh():
    devices = topology_devices("v6e:2x2", num_slices=3)
    with pytest.raises(ConfigError, match="--parallelism.topology_aware: .* over 3 slices of 4 devices"):
        mesh_order(devices, MeshSpec(("dp_replicate", "dp_shard"), (2, 6)))
