"""JAX's devices in the order in which a mesh takes them."""

from collections.abc import Sequence
from typing import Any

from titan.core.config.validate import ConfigError
from titan.core.hardware import Hardware, find_hardware
from titan.parallel.mesh import MeshSpec
from titan.parallel.tpu_topology.topology import assign
from titan.parallel.tpu_topology.torus import DevicePosition, Torus, row_major


def mesh_order(devices: Sequence[Any], mesh: MeshSpec, *, cubes: bool = True) -> list[Any]:
    """The devices in an order in which mesh axes run along rings of the slices' torus (see `topology.assign`).

    In their own order if they are no TPUs, do not fill equal slices, or are more than the mesh has.

    Args:
      devices: of JAX, all that are present.
      mesh: the axes, outermost first.
      cubes: whether shards of 64 chips are cubes.

    Raises:
      ConfigError: the slices do not divide the mesh's axes.
    """
    hardware = find_hardware(devices[0].device_kind)
    if hardware is None or mesh.num_devices != len(devices) or len(devices) == 1:
        return list(devices)
    by_position = _by_position(devices, hardware)
    torus = _torus(by_position, hardware)
    if set(row_major(torus)) != set(by_position):
        return list(devices)
    try:
        order = assign(torus, dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)), cubes=cubes).order
    except ValueError as error:
        raise ConfigError(
            "parallelism.topology_aware",
            f"the mesh {mesh} does not lie over {torus.num_slices} slices of {len(devices) // torus.num_slices} "
            f"devices: {error}",
            f"give a multiple of {torus.num_slices} to --parallelism.data_parallel_replicate, or false to this",
        ) from error
    return [by_position[position] for position in order]


def _by_position(devices: Sequence[Any], hardware: Hardware) -> dict[DevicePosition, Any]:
    """Slices numbered from 0, coordinates from the corner of each slice."""
    by_slice: dict[int, list[Any]] = {}
    for device in devices:
        # Of one slice alone libtpu gives no index.
        by_slice.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    by_position = {}
    for number, index in enumerate(sorted(by_slice)):
        # Three coordinates, also where a slice has two dims.
        coords = [tuple(device.coords)[: hardware.slice_dims] for device in by_slice[index]]
        corner = [min(along) for along in zip(*coords, strict=True)]
        for device, at in zip(by_slice[index], coords, strict=True):
            place = tuple(value - least for value, least in zip(at, corner, strict=True))
            by_position[DevicePosition(number, place, device.core_on_chip)] = device
    return by_position


def _torus(positions: dict[DevicePosition, Any], hardware: Hardware) -> Torus:
    """The smallest that holds all positions."""
    shape = tuple(max(along) + 1 for along in zip(*(position.coords for position in positions), strict=True))
    num_slices = 1 + max(position.slice_index for position in positions)
    return Torus(shape, hardware.wraps(shape), hardware.devices_per_chip, num_slices)
