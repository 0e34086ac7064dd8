"""XLA:TPU's out-of-memory errors as data."""

import re

_SIZE = r"([\d.]+)([KMGT]?)"
_ERRORS = (
    # libtpu 0.0.42: arguments and results are among these "temporaries".
    re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class OutOfDeviceMemoryError(RuntimeError):
    """A program does not fit into a device's memory.

    Attributes:
      needed_bytes: what the compiler says it needs, arguments included.
      available_bytes: what it says a device has.
    """

    def __init__(self, needed_bytes: int, available_bytes: int):
        super().__init__(
            f"a device needs {needed_bytes / 2**30:.2f} GiB of memory and has {available_bytes / 2**30:.2f} GiB"
        )
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


def out_of_device_memory(message: str) -> OutOfDeviceMemoryError | None:
    """The error that a message of the compiler means; None if it means another."""
    for pattern in _ERRORS:
        if match := pattern.search(message):
            return OutOfDeviceMemoryError(_bytes(match[1], match[2]), _bytes(match[3], match[4]))
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
