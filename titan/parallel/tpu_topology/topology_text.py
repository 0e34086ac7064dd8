"""An assignment of devices to a mesh as text."""

import math
from collections.abc import Iterator

from titan.parallel.tpu_topology.link_load import modelled_time
from titan.parallel.tpu_topology.placement import AxisPlacement
from titan.parallel.tpu_topology.topology import Assignment


def to_text(assignment: Assignment) -> str:
    """What each axis takes and asks of the links, and for every chip of the first slice its place on the mesh."""
    torus = assignment.torus
    slices = "one slice" if torus.num_slices == 1 else f"{torus.num_slices} slices"
    shape = "x".join(map(str, torus.shape))
    rings = ", ".join(str(dim) for dim, wrap in enumerate(torus.wraps) if wrap) or "none"
    sizes = tuple(assignment.axes.values())
    costs = [modelled_time(sizes, loads) for loads in (assignment.loads, assignment.naive_loads)]
    lines = [
        f"{slices} of {shape} chips, {torus.num_devices} devices; dims whose ends are joined: {rings}",
        "",
        *_table(assignment),
        f"modelled time of a ring collective along every axis: {costs[0]:.2f}, row-major {costs[1]:.2f}",
        "",
        *_places(assignment),
    ]
    return "\n".join(lines) + "\n"


def _table(assignment: Assignment) -> Iterator[str]:
    rows = [("axis", "takes of the slices", "hops: most, mean", "link load", "row-major: hops", "link load")]
    for (name, size), placement, load, naive in zip(
        assignment.axes.items(), assignment.placements, assignment.loads, assignment.naive_loads, strict=True
    ):
        hops = [f"{one.max_hops}, {one.mean_hops:.2f}" for one in (load, naive)]
        rows.append((f"{name}={size}", _taken(placement), hops[0], f"{load.link_load}", hops[1], f"{naive.link_load}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _taken(placement: AxisPlacement) -> str:
    parts = []
    if placement.num_slices > 1:
        parts.append(f"{placement.num_slices} slices")
    if math.prod(placement.extent) > 1:
        steps = [step if part > 1 else 1 for part, step in zip(placement.extent, placement.stride, strict=True)]
        chips = "x".join(map(str, placement.extent)) + " chips"
        parts.append(f"{chips} in steps of {'x'.join(map(str, steps))}" if math.prod(steps) > 1 else chips)
    if placement.cores > 1:
        parts.append(f"the {placement.cores} devices of a chip")
    return " x ".join(parts) or "-"


def _places(assignment: Assignment) -> Iterator[str]:
    """The chips of the first slice, plane by plane of the last of three dims; at each the place of its first device."""
    sizes = tuple(assignment.axes.values())
    num_columns, num_rows, *planes = assignment.torus.shape
    places = {}
    for number, device in enumerate(assignment.order):
        if device.slice_index == device.core == 0:
            strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
            places[device.coords] = ".".join(
                str(number // step % size) for step, size in zip(strides, sizes, strict=True)
            )
    first = "" if assignment.torus.devices_per_chip == 1 else ", of a chip that of its first device"
    yield f"places on the mesh ({'.'.join(assignment.axes)}){first}; dim 0 to the right, dim 1 downwards:"
    width = max(map(len, places.values()))
    for plane in range(planes[0] if planes else 1):
        if planes:
            yield f"dim 2 at {plane}:"
        for row in range(num_rows):
            at = ((column, row, plane)[: len(assignment.torus.shape)] for column in range(num_columns))
            yield "  " + "  ".join(places[coords].rjust(width) for coords in at)
