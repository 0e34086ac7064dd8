"""Starts the processes of a run of the torch executor on this machine, as torchrun would."""

import os
import socket
from collections.abc import Callable
from typing import Any


def launch(num_processes: int, program: Callable[..., int], *args: Any) -> int:
    """Runs `program(*args)` in so many processes with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.

    Returns:
      The first exit code that is not 0, or 0.
    """
    import torch.multiprocessing as mp

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_run, args=(rank, num_processes, port, program, args)) for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return next((abs(process.exitcode) for process in processes if process.exitcode), 0)


def _run(rank: int, num_processes: int, port: int, program: Callable[..., int], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(num_processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    raise SystemExit(program(*args))
