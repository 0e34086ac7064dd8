"""Stopping a run politely: SIGTERM and SIGINT become a request that the loop obeys between two steps."""

import contextlib
import dataclasses
import logging
import signal
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class StopRequest:
    """The signal that asked to stop, or None so far."""

    signal: int | None = None


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Collects SIGTERM and SIGINT instead of dying of them; a second signal of a kind acts as it always did."""
    request = StopRequest()
    previous: dict[int, Any] = {}

    def handle(number: int, frame: Any) -> None:
        request.signal = number
        signal.signal(number, previous[number])
        _log.warning("%s: stopping after this step; a checkpoint is saved first", signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        previous[number] = signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
