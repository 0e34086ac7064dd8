"""An assignment of devices to a mesh as a picture."""

import colorsys
import html
import math
from collections.abc import Iterator, Sequence

from titan.parallel.tpu_topology.link_load import axis_groups, rings_of
from titan.parallel.tpu_topology.topology import Assignment
from titan.parallel.tpu_topology.torus import Point

_CELL = 34  # pixels from chip to chip
_GAP = 30  # between planes
_LINE = 18  # of text
_WIDTH = 1100  # after which planes go on below


def to_svg(assignment: Assignment) -> str:
    """The chips of the first slice with the rings of each mesh axis over them, as an SVG document.

    Planes of the last of three dims lie side by side. All rings of the innermost axis are drawn, of the others that
    through the first device. A ring leaves a plane at a full dot and enters it at an open one; over ends that are
    joined it goes by a stub at either. Small numbers count along the ring.
    """
    torus = assignment.torus
    num_columns, num_rows, *planes = torus.shape
    step_x, step_y = num_columns * _CELL + _GAP, num_rows * _CELL + _GAP
    per_line = max(1, _WIDTH // step_x)
    num_planes = planes[0] if planes else 1
    drawn = [axis for axis, one in enumerate(assignment.placements) if math.prod(one.extent) > 1]
    parts: list[str] = []
    top = _LINE
    for axis in drawn:
        (name, size), load = list(assignment.axes.items())[axis], assignment.loads[axis]
        parts.append(
            f'<text x="0" y="{top}" font-weight="600">{html.escape(name)}={size}: {load.max_hops} hops at most, '
            f"{load.mean_hops:.2f} on average, {load.link_load} ring edges on the busiest link</text>"
        )
        corners = [(plane % per_line * step_x, top + _LINE + plane // per_line * step_y) for plane in range(num_planes)]
        parts += [
            f'<circle cx="{x + column * _CELL}" cy="{y + row * _CELL}" r="3" fill="#c4c9d1"/>'
            for x, y in corners
            for column in range(num_columns)
            for row in range(num_rows)
        ]
        for number, ring in enumerate(_rings(assignment, axis, first_alone=axis != drawn[-1])):
            parts += _drawn(ring, torus.shape, corners, _colour(number))
        top = corners[-1][1] + step_y + _LINE
    width = min(num_planes, per_line) * step_x if drawn else 0
    width = max(width, 640)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-20 0 {width + 20} {top}" width="{width + 20}" '
        f'height="{top}" font-family="system-ui, sans-serif" font-size="12" fill="#1d2330">\n'
        f'<rect x="-20" width="{width + 20}" height="{top}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _rings(assignment: Assignment, axis: int, *, first_alone: bool) -> list[tuple[Point, ...]]:
    """The rings of chips of an axis in the first slice, each once however many devices of its chips it joins."""
    rings: dict[tuple[Point, ...], None] = {}
    for group in axis_groups(tuple(assignment.axes.values()), axis, assignment.order):
        chips = [device.coords for device in group if device.slice_index == 0]
        if chips:
            rings.update((tuple(dict.fromkeys(ring)), None) for ring in rings_of(assignment.torus, chips))
        if first_alone and rings:
            break
    return list(rings)


def _colour(number: int) -> str:
    """Hues by the golden ratio, so that rings side by side differ."""
    parts = colorsys.hsv_to_rgb(number * 0.618 % 1, 0.75, 0.75)
    return "#" + "".join(f"{round(part * 255):02x}" for part in parts)


def _drawn(
    ring: tuple[Point, ...], shape: tuple[int, ...], corners: Sequence[tuple[int, int]], colour: str
) -> Iterator[str]:
    def centre(chip: Point) -> tuple[float, float]:
        x, y = corners[chip[2] if len(chip) > 2 else 0]
        return x + chip[0] * _CELL, y + chip[1] * _CELL

    for start, end in zip(ring, (*ring[1:], ring[0]), strict=True):
        (x, y), (to_x, to_y) = centre(start), centre(end)
        # From edge to edge of a dim of more than two: over its joined ends.
        over = [dim for dim in (0, 1) if shape[dim] > 2 and abs(start[dim] - end[dim]) == shape[dim] - 1]
        if start[2:] != end[2:]:
            yield f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>'
            yield f'<circle cx="{to_x}" cy="{to_y}" r="7" fill="none" stroke="{colour}" stroke-width="2"/>'
        elif over:
            for chip, (at_x, at_y) in ((start, (x, y)), (end, (to_x, to_y))):
                stub = [_CELL * (0 if dim not in over else -0.45 if chip[dim] == 0 else 0.45) for dim in (0, 1)]
                yield _line(at_x, at_y, at_x + stub[0], at_y + stub[1], colour)
        else:
            yield _line(x, y, to_x, to_y, colour)
    for number, chip in enumerate(ring):
        x, y = centre(chip)
        yield f'<text x="{x + 4}" y="{y - 4}" font-size="8" fill="#555">{number}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{colour}" stroke-width="2.5"/>'
