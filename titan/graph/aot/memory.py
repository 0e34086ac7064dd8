"""The account of one device's memory: arguments by their layouts, temporaries from the compiled program."""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from titan.graph.aot.hlo import HloModule
from titan.graph.aot.live_buffers import LiveBuffer, live_at_peak
from titan.graph.aot.origin import origin
from titan.graph.aot.out_of_memory import Allocation, OutOfDeviceMemoryError
from titan.graph.aot.report import Buffer, Memory
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec

NUM_LARGEST = 10
"""How many of the largest buffers a report lists."""

GATHERED = "gathered parameters"
SAVED = "saved activations"
GRADIENTS = "gradients"
TEMPORARIES = "temporaries"


def argument_bytes(layouts: Iterable[TensorLayout], mesh: MeshSpec) -> int:
    """Bytes of one device's shards, without padding. Integers of 64 bits are 32 in a compiled program."""
    return sum(math.prod(layout.local_shape(mesh)) * min(_item_bytes(layout.dtype), 4) for layout in layouts)


def memory_of(
    stats: Any, module: HloModule | None, header: str, *, capacity: int, arguments: Mapping[str, int]
) -> Memory:
    """The memory of a program that was compiled, and so fits.

    Args:
      stats: what `jax.stages.Compiled.memory_analysis()` gives.
      module: the optimized HLO; None if its text could not be had.
      header: the first line of the text.
      capacity: bytes that the compiler lets a program have.
      arguments: bytes of "parameters", "optimizer_state" and "batch".
    """
    live = live_at_peak(module, header) if module else ()
    at_peak: collections.Counter[str] = collections.Counter()
    for buffer in live:
        at_peak[_kind(buffer)] += buffer.bytes
    buffers = [(buffer.bytes, str(buffer.array), _kind(buffer), str(origin(buffer.op_name))) for buffer in live]
    return Memory(
        capacity=capacity,
        peak=stats.peak_memory_in_bytes,
        fits=True,
        **arguments,
        arguments=stats.argument_size_in_bytes,
        at_peak=dict(at_peak.most_common()),
        host=stats.host_temp_size_in_bytes + stats.host_argument_size_in_bytes,
        largest=_largest(buffers),
        needed=stats.peak_memory_in_bytes,
        advice=(),
    )


def memory_that_does_not_fit(
    error: OutOfDeviceMemoryError, *, capacity: int, arguments: Mapping[str, int], advice: Sequence[str]
) -> Memory:
    """The memory of a program that the compiler refused.

    Args:
      error: what it said.
      capacity, arguments: see `memory_of`.
      advice: what to change.
    """
    needed = error.needed_bytes + (sum(arguments.values()) if error.is_temporaries_alone else 0)
    return Memory(
        capacity=capacity,
        peak=None,
        fits=False,
        **arguments,
        arguments=None,
        at_peak={},
        host=0,
        largest=_largest(map(_described, error.allocations)),
        needed=needed,
        advice=tuple(advice),
    )


def _item_bytes(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _kind(buffer: LiveBuffer) -> str:
    made, read = origin(buffer.op_name), origin(buffer.last_op_name)
    if "all-gather" in buffer.opcode or made.operation.startswith("all_gather"):
        return GATHERED
    if made.region in ("forward", "loss") and read.region == "backward":
        return SAVED
    if made.region == "backward" and read.region == "optimizer":
        return GRADIENTS
    return TEMPORARIES


def _described(allocation: Allocation) -> tuple[int, str, str, str]:
    made = origin(allocation.op_name)
    kind = GATHERED if made.operation.startswith("all_gather") else allocation.kind or TEMPORARIES
    return allocation.bytes, allocation.shape, kind, str(made)


def _largest(buffers: Iterable[tuple[int, str, str, str]]) -> tuple[Buffer, ...]:
    """Those alike in all but size summed up, the largest sums first."""
    sums: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    for num_bytes, shape, kind, made_by in buffers:
        sums[shape, kind, made_by].append(num_bytes)
    rows = [Buffer(sum(sizes), len(sizes), shape, kind, made_by) for (shape, kind, made_by), sizes in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:NUM_LARGEST])
