"""One run at a time per folder: a second would remove the files that the first is writing."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from titan.core.config.validate import ConfigError


@contextlib.contextmanager
def folder_lock(folder: pathlib.Path) -> Iterator[None]:
    """Holds the run folder (made if it is missing) for this process; the lock ends with the process, however that ends.

    Raises:
      ConfigError: another process holds it, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "a+")
    except OSError as error:
        problem = f"{folder} cannot be written ({error.strerror})"
        raise ConfigError("checkpoint.folder", problem, "give another folder") from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "checkpoint.folder",
                f"process {holder(folder)} is training in {folder}",
                "wait for it, stop it, or give another folder",
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        os.fsync(file.fileno())  # processes on other hosts read it
        yield


def holder(folder: pathlib.Path) -> str:
    """The process that holds a run folder, or held it last; empty where none has."""
    try:
        return (folder / "lock").read_text().strip()
    except FileNotFoundError:
        return ""
