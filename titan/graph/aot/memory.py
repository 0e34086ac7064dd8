"""The account of one device's memory: arguments by their layouts, temporaries from the compiled program."""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from titan.graph.aot.buffers import LiveBuffer, live_at_peak, usage
from titan.graph.aot.origin import origin
from titan.graph.aot.report import Buffer, Memory
from titan.graph.ir.region import PARAMETER_SCOPE
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec

NUM_LARGEST = 10
"""How many of the largest buffers a report lists."""

_TIMELINE_POINTS = 200
_LAYER = re.compile(r"\.\d+(?=[. ])")
_SMALLEST = 2**10  # tables of addresses and the like are not worth a line

GATHERED = "gathered parameters"
SAVED = "saved activations"
GRADIENTS = "gradients"
TEMPORARIES = "temporaries"
BETWEEN = "between programs"


def argument_bytes(layouts: Iterable[TensorLayout], mesh: MeshSpec) -> int:
    """Bytes of one device's shards, without padding. Integers of 64 bits are 32 in a compiled program."""
    return sum(math.prod(layout.local_shape(mesh)) * min(layout.dtype.itemsize, 4) for layout in layouts)


def memory_of(
    buffers: Sequence[LiveBuffer],
    *,
    fits: bool,
    needed: int,
    capacity: int,
    arguments: Mapping[str, int],
    program: int | None = None,
    host: int | None = None,
) -> Memory:
    """The memory of a program.

    Args:
      buffers: all temporaries.
      fits: whether it was compiled.
      needed: what the compiler says the program needs at its peak, in bytes.
      capacity: bytes that the compiler lets a program have.
      arguments: bytes of "parameters", "optimizer_state" and "batch".
      program, host: see `Memory`.
    """
    at_peak: collections.Counter[str] = collections.Counter()
    rows = []
    for buffer in live_at_peak(buffers):
        kind = _kind(buffer)
        at_peak[kind] += buffer.bytes
        rows.append((buffer.bytes, buffer.shape, kind, str(origin(buffer.op_name))))
    return Memory(
        capacity=capacity,
        needed=needed,
        fits=fits,
        **arguments,
        at_peak=dict(at_peak.most_common()),
        program=program,
        host=host,
        timeline=usage(((_kind(buffer), buffer) for buffer in buffers), _TIMELINE_POINTS),
        largest=_largest(rows),
        advice=(),
    )


def _kind(buffer: LiveBuffer) -> str:
    made, read = origin(buffer.op_name), origin(buffer.last_op_name)
    *scope, operation = made.operation.split("/")
    # Activations are gathered too, by tensor parallelism.
    if PARAMETER_SCOPE in scope and ("all-gather" in buffer.opcode or operation.startswith("all_gather")):
        return GATHERED
    if made.region in ("forward", "loss") and read.region == "backward":
        return SAVED
    if made.region == "backward" and read.region == "optimizer":
        return GRADIENTS
    return TEMPORARIES


def _largest(buffers: Iterable[tuple[int, str, str, str]]) -> tuple[Buffer, ...]:
    """Those alike in all but their layer summed up, the largest sums first."""
    buffers = [buffer for buffer in buffers if buffer[0] >= _SMALLEST]
    sums: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    for num_bytes, shape, kind, made_by in buffers:
        sums[shape, kind, _LAYER.sub(".*", made_by)].append(num_bytes)
    rows = [Buffer(sum(sizes), len(sizes), shape, kind, made_by) for (shape, kind, made_by), sizes in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:NUM_LARGEST])
