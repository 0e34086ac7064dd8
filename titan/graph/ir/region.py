"""Regions of the training step: which part of it (forward, loss, backward, optimizer) an op belongs to."""

import contextlib
import contextvars
from collections.abc import Iterator

REGIONS = ("forward", "loss", "backward", "optimizer")

PARAMETER_SCOPE = "parameter"
"""The last name, after region and module, of where an instruction comes from that gathers a parameter."""

_current: contextvars.ContextVar[str] = contextvars.ContextVar("region", default="forward")


@contextlib.contextmanager
def region(name: str) -> Iterator[None]:
    """Ops run inside are captured with `meta["region"] = name`; outside a capture this does nothing.

    Raises:
      ValueError: the name is not one of `REGIONS`.
    """
    if name not in REGIONS:
        raise ValueError(f"region must be one of {REGIONS}, not {name!r}")
    token = _current.set(name)
    try:
        yield
    finally:
        _current.reset(token)


def current_region() -> str:
    """The innermost region, `forward` where none was entered."""
    return _current.get()
