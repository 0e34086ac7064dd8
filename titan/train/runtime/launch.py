"""Starts the processes of a run on this machine, as torchrun would."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

# After one process failed the others have so long to end by themselves and to say why.
_SECONDS_AFTER_FAILURE = 10.0


def launch(num_processes: int, program: Callable[..., int], *args: Any) -> int:
    """Runs `program(*args)` in so many processes with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.

    SIGTERM and SIGINT are passed on to all of them. When one fails the others are ended, since they would wait for it
    in their next collective; when this process is killed they end too.

    Returns:
      0, or the exit code of the first process that failed: 128 + n if signal n ended it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run, args=(rank, num_processes, port, program, args)) for rank in range(num_processes)
    ]

    def pass_on(number: int, frame: Any) -> None:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, number)

    for process in processes:
        process.start()
    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _wait(processes)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(processes: list[Any]) -> int:
    code, running = 0, list(processes)
    while running:
        patience = _SECONDS_AFTER_FAILURE if 0 < code < 128 else None  # those asked to stop save first
        if not multiprocessing.connection.wait([process.sentinel for process in running], patience):
            for process in running:
                process.kill()
        for process in [process for process in running if not process.is_alive()]:
            running.remove(process)
            code = code or (process.exitcode if process.exitcode >= 0 else 128 - process.exitcode)
    return code


def _run(rank: int, num_processes: int, port: int, program: Callable[..., int], args: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)  # Ctrl-C at a terminal reaches the launcher alone, which passes it on: once, not twice
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    raise SystemExit(program(*args))


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
