"""What a program is busy with, for whoever waits: a live line on a terminal, elsewhere a plain line now and then.

    with progress("compiling train_step"):
        ...

A terminal shows the work and for how long it has been going on. A pipe or file gets nothing about work that is quick,
and for long work one line each `INTERVAL_SECONDS`, and one at its end.
"""

import contextlib
import contextvars
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

INTERVAL_SECONDS = 30.0
"""Seconds between two plain lines, unless the environment variable TITAN_PROGRESS_SECONDS says otherwise (0: none)."""

_is_quiet: contextvars.ContextVar[bool] = contextvars.ContextVar("titan_progress_is_quiet", default=False)


class Work:
    """A piece of work that is shown; made by `progress`."""

    def __init__(self, name: str, total: int | None):
        """Initializes the instance; see `progress`."""
        self.name = name
        self.total = total
        self.done = 0
        self.started_at = time.monotonic()

    def advance(self, number: int = 1) -> None:
        """Counts parts that are done."""
        self.done += number

    @property
    def line(self) -> str:
        """The work, how much of it is done, and for how long it has been going on."""
        part = f": {self.done}" if self.done or self.total is not None else ""
        whole = f" of {self.total}" if self.total is not None else ""
        return f"{self.name}{part}{whole}, {duration(time.monotonic() - self.started_at)}"


@contextlib.contextmanager
def progress(name: str, *, total: int | None = None, stream: TextIO | None = None) -> Iterator[Work]:
    """Shows a piece of work while the `with` block runs.

    Args:
      name: what is being done, as "compiling train_step".
      total: its parts, where they are counted by `Work.advance`.
      stream: where lines go; default standard error.
    """
    work = Work(name, total)
    stream = sys.stderr if stream is None else stream
    if _is_quiet.get():
        yield work
    elif stream.isatty():
        with _live(work, stream):
            yield work
    else:
        with _plain(work, stream):
            yield work


@contextlib.contextmanager
def quiet(is_quiet: bool = True) -> Iterator[None]:
    """Within it `progress` shows nothing, as on processes that leave reports to the first."""
    token = _is_quiet.set(is_quiet)
    try:
        yield
    finally:
        _is_quiet.reset(token)


def duration(seconds: float) -> str:
    """A time as people say it: "8 s", "2 min 5 s", "3 h 20 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    minutes = round(whole / 60)
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


@contextlib.contextmanager
def _live(work: Work, stream: TextIO) -> Iterator[None]:
    from rich.console import Console
    from rich.status import Status

    console = Console(file=stream, highlight=False)
    with Status(work.line, console=console) as status, _every(0.5, lambda: status.update(work.line)):
        yield


@contextlib.contextmanager
def _plain(work: Work, stream: TextIO) -> Iterator[None]:
    interval = float(os.environ.get("TITAN_PROGRESS_SECONDS") or INTERVAL_SECONDS)
    if interval <= 0:
        yield
        return
    with _every(interval, lambda: print(f"{work.line} so far", file=stream, flush=True)):
        yield
    if time.monotonic() - work.started_at >= interval:
        print(f"{work.line}, done", file=stream, flush=True)


@contextlib.contextmanager
def _every(seconds: float, show) -> Iterator[None]:
    """Calls `show` from a thread of its own: what is waited for, such as a compiler, may not return for minutes."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(seconds):
            show()

    thread = threading.Thread(target=run, name="titan-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
