"""Closed rings through all points of a box, with as few hops between neighbours as the shape permits."""

from collections.abc import Iterator, Sequence

from titan.parallel.tpu_topology.torus import Point


def closed_rings(sizes: Sequence[int], wraps: Sequence[bool]) -> Iterator[list[Point]]:
    """Orders of all points of a box in which neighbours, the last and the first among them, are near one another.

    All neighbours are one hop apart where such a ring exists by construction: in a dim whose ends are joined, in a dim
    of two, and in every box of two dims or more with an even number of points. Otherwise they are at most two apart.

    Args:
      sizes: points along each dim.
      wraps: whether the last point of a dim is a neighbour of its first.

    Yields:
      One ring for each role that the dims can have; they differ in which dims are walked along most.
    """
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    for dim in dims or [None]:
        rest = [other for other in dims if other != dim]
        for columns in _orders(rest):
            yield [_place(point, (dim, *columns), len(sizes)) for point in _ring(dim, columns, sizes, wraps)]


def _orders(dims: list[int]) -> list[tuple[int, ...]]:
    """The dims as they are and the other way round: a slice has three, and one of them is taken."""
    return [tuple(dims), tuple(reversed(dims))] if len(dims) > 1 else [tuple(dims)]


def _place(point: Point, dims: Sequence[int | None], num_dims: int) -> Point:
    coordinates = [0] * num_dims
    for dim, coordinate in zip(dims, point, strict=False):
        if dim is not None:
            coordinates[dim] = coordinate
    return tuple(coordinates)


def _ring(dim: int | None, columns: tuple[int, ...], sizes: Sequence[int], wraps: Sequence[bool]) -> list[Point]:
    """A ring through rows along `dim`, each of which runs along a path through the dims `columns`.

    The first column is kept free for the way back: rows are walked to and fro over the others.
    """
    if dim is None:
        return [()]
    num_rows = sizes[dim]
    if not columns:
        order = range(num_rows) if wraps[dim] or num_rows == 2 else _folded(num_rows)
        return [(row,) for row in order]
    path = _path([sizes[column] for column in columns])
    last = len(path) - 1
    ring = [(0, *path[0])]
    for row in range(num_rows):
        ring += [(row, *point) for point in (path[1:] if row % 2 == 0 else path[:0:-1])]
    if num_rows % 2 and not (len(columns) == 1 and wraps[columns[0]]):
        # An odd number of rows ends at the far end. Unless that is beside the first column, the last row is folded.
        ring[-last:] = [(num_rows - 1, *path[column]) for column in _folded(last + 1)[::-1] if column]
    return ring + [(row, *path[0]) for row in reversed(range(1, num_rows))]


def _folded(size: int) -> list[int]:
    """A line there and back, every second point each way: 0, 2, 4, ..., 5, 3, 1."""
    return [*range(0, size, 2), *reversed(range(1, size, 2))]


def _path(sizes: Sequence[int]) -> list[Point]:
    """All points of a box, each one hop from the one before; the last dim is walked to and fro."""
    if not sizes:
        return [()]
    inner = _path(sizes[1:])
    return [(row, *point) for row in range(sizes[0]) for point in (inner if row % 2 == 0 else inner[::-1])]
