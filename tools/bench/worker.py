"""A contender of a benchmark in a process of its own, which sleeps except while it is its turn."""

import ctypes
import dataclasses
import gc
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol


class Contender(Protocol):
    """What is measured."""

    def step(self, *arguments: Any) -> Any:
        """One turn, waited for: a training step, say, that returns its loss."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step of a contender.

    Attributes:
      seconds: wall time.
      cpu_seconds: time of all its threads; it depends less on other load of the machine.
      peak_bytes: the most memory that the process held during the step, above what it held before; without
        `keep_freed_memory` that is what the step needed.
      result: of the step.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    result: Any


class Worker:
    """A process that does one step at each call.

    Contenders do not share a process, since thread pools of one would disturb the other: OpenMP's threads, for example,
    spin for a while after the work is done.
    """

    def __init__(self, make_contender: Callable[..., Contender], *arguments: Any, keep_freed_memory: bool = False):
        """Starts the process and returns when it is ready to step.

        Args:
          make_contender: a function of a module, called as `make_contender(*arguments)` in the new process.
          arguments: what it takes; they are pickled.
          keep_freed_memory: whether the process keeps between its turns what it has freed, as it does between the
            steps of a loop when the environment is set for it.

        Raises:
          RuntimeError: the process could not make its contender; the traceback is on standard error.
        """
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other_end, make_contender, arguments, keep_freed_memory), daemon=True
        )
        self._process.start()
        other_end.close()
        self._receive()

    def step(self, *arguments: Any) -> Turn:
        """Has the contender step; the transfer of the arguments is not timed.

        Raises:
          RuntimeError: the step failed; the traceback is on standard error.
        """
        self._connection.send(arguments)
        return self._receive()

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a worker ended with code {self._process.exitcode}; see its traceback above") from None


def set_environment(*, keep_freed_memory: bool = False) -> None:
    """The environment of all workers alike; call it before the first is started.

    PyTorch uses every core, as JAX on CPUs always does. glibc asks for huge pages: a step allocates and frees some
    hundred megabytes, which in small pages costs any of the contenders a good part of its time in page faults.

    Args:
      keep_freed_memory: whether glibc keeps what is freed. By default it returns blocks of more than 32 MiB to the
        kernel at once; a virtual machine may return them to its host, and page faults then take longer than a step.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(os.cpu_count())
    tunables = {"hugetlb": 1}
    if keep_freed_memory:
        # No block is a mapping of its own, and none is in an arena that cannot grow to its size.
        tunables |= {"mmap_max": 0, "arena_max": 1, "trim_threshold": 1 << 40}
    os.environ["GLIBC_TUNABLES"] = ":".join(f"glibc.malloc.{name}={value}" for name, value in tunables.items())
    os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu, which is installed to compile for TPUs, would look for one first


def _serve(
    connection: Connection,
    make_contender: Callable[..., Contender],
    arguments: tuple[Any, ...],
    keep_freed_memory: bool,
) -> None:
    contender = make_contender(*arguments)
    connection.send(None)
    while True:
        try:
            step_arguments = connection.recv()
        except EOFError:
            return
        gc.collect()
        if not keep_freed_memory:
            _LIBC.malloc_trim(0)  # what the allocator keeps for later would hide that it is needed again
        _CLEAR_REFS.write_text("5")  # the kernel forgets the peak so far
        held = _status_bytes("VmRSS")
        start, cpu_start = time.perf_counter(), time.process_time()
        result = contender.step(*step_arguments)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        connection.send(Turn(seconds, cpu_seconds, _status_bytes("VmHWM") - held, result))


_LIBC = ctypes.CDLL(None)
_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")


def _status_bytes(name: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
