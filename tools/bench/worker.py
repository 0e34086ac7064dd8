"""A contender of a benchmark in a process of its own, which sleeps except while it is its turn."""

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

Batch = Mapping[str, np.ndarray]


class Trainer(Protocol):
    """What a contender offers."""

    def step(self, batch: Batch, learning_rate: float) -> float:
        """One whole training step, waited for; returns its loss."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One step of a contender.

    Attributes:
      seconds: wall time, from a batch in host memory to the updated state.
      cpu_seconds: time of all its threads; it depends less on other load of the machine.
      loss: before the update.
    """

    seconds: float
    cpu_seconds: float
    loss: float


class Worker:
    """A process that trains on given batches, one step at each call.

    Contenders do not share a process, since thread pools of one would disturb the other: OpenMP's threads, for example,
    spin for a while after the work is done.
    """

    def __init__(self, make_trainer: Callable[..., Trainer], arguments: tuple[Any, ...], batches: Sequence[Batch]):
        """Starts the process and returns when it is ready to step.

        Args:
          make_trainer: a function of a module, called as `make_trainer(*arguments)` in the new process.
          batches: those that `step` names by index.

        Raises:
          RuntimeError: the process could not make its trainer; the traceback is on standard error.
        """
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(other_end, make_trainer, arguments, batches), daemon=True)
        self._process.start()
        other_end.close()
        self._receive()

    def step(self, index: int, learning_rate: float) -> Turn:
        """Trains on `batches[index]`.

        Raises:
          RuntimeError: the step failed; the traceback is on standard error.
        """
        self._connection.send((index, learning_rate))
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


def set_environment() -> None:
    """The environment of all workers alike; call it before the first is started.

    PyTorch uses every core, as JAX on CPUs always does. glibc asks for huge pages: a step allocates and frees some
    hundred megabytes, which in small pages costs any of the contenders a good part of its time in page faults.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(os.cpu_count())
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"


def _serve(
    connection: Connection, make_trainer: Callable[..., Trainer], arguments: tuple[Any, ...], batches: Sequence[Batch]
) -> None:
    trainer = make_trainer(*arguments)
    connection.send(None)
    while True:
        try:
            index, learning_rate = connection.recv()
        except EOFError:
            return
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = trainer.step(batches[index], learning_rate)
        connection.send(Turn(time.perf_counter() - start, time.process_time() - cpu_start, loss))
