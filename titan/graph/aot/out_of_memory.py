"""XLA:TPU's out-of-memory error as data: how much is needed, of how much, and the largest buffers."""

import dataclasses
import re

from titan.graph.aot.hlo import parse_arrays

_SIZE = r"([\d.]+)([KMGT]?)"
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_TEMPORARIES = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_ALLOCATION = re.compile(rf"^\s*\d+\. Size: {_SIZE}\s*$", re.MULTILINE)
_OPERATOR = re.compile(r'op_name="([^"]*)"')
_SHAPE = re.compile(r"^\s*Shape: (.*)$", re.MULTILINE)
_LABEL = re.compile(r"^\s*XLA label: (.*)$", re.MULTILINE)
_KIND = re.compile(r"^\s*Allocation type: (.*)$", re.MULTILINE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A buffer of a program that does not fit.

    Attributes:
      bytes: with padding, as exactly as the error states it.
      shape: such as "bf16[8192,4096]"; "" if not stated.
      op_name: JAX's name of the operation that makes it; "" if the compiler made it up.
      kind: the compiler's word for it, such as "HLO temp".
    """

    bytes: int
    shape: str
    op_name: str
    kind: str


class OutOfDeviceMemoryError(RuntimeError):
    """A program does not fit into a device's memory.

    Attributes:
      needed_bytes: what the compiler says it needs; of some programs, temporaries alone.
      available_bytes: what a device has.
      is_temporaries_alone: whether `needed_bytes` leaves out the arguments.
      allocations: the largest buffers, the largest first; empty where the compiler gave up before placing them.
    """

    def __init__(
        self,
        needed_bytes: int,
        available_bytes: int,
        is_temporaries_alone: bool,
        allocations: tuple[Allocation, ...],
    ):
        super().__init__(f"the program needs {needed_bytes / 2**30:.2f} GiB of {available_bytes / 2**30:.2f} GiB")
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.is_temporaries_alone = is_temporaries_alone
        self.allocations = allocations


def out_of_device_memory(message: str) -> OutOfDeviceMemoryError | None:
    """The error that a message of the compiler means; None if it means another."""
    used, temporaries = _USED.search(message), _TEMPORARIES.search(message)
    match = used or temporaries
    if not match:
        return None
    starts = [found.start() for found in _ALLOCATION.finditer(message)]
    pieces = [message[start:end] for start, end in zip(starts, [*starts[1:], len(message)])]
    return OutOfDeviceMemoryError(
        _bytes(match[1], match[2]), _bytes(match[3], match[4]), used is None, tuple(map(_allocation, pieces))
    )


def _allocation(text: str) -> Allocation:
    size = _ALLOCATION.search(text)
    operator, shape, label, kind = (pattern.search(text) for pattern in (_OPERATOR, _SHAPE, _LABEL, _KIND))
    arrays = parse_arrays(shape[1]) if shape else ()
    if not operator and label:
        operator = _OPERATOR.search(label[1])
    return Allocation(
        _bytes(size[1], size[2]),
        str(arrays[0]) if arrays else "",
        operator[1] if operator else "",
        kind[1].strip() if kind else "",
    )


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
