"""What tells one state of files from another without reading them, and results remembered under it."""

import dataclasses
import hashlib
import os
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from titan.core.files import write_atomically

# A file may be written twice within one tick of the file system's clock. Younger files are read again the next time.
_CLOCK_TICK_NANOSECONDS = 100_000_000


@dataclasses.dataclass(frozen=True)
class FileStamp:
    """A state of files.

    Attributes:
      digest: 32 hexadecimal digits of names, sizes, inodes and times. The time of change among these is set by the file
        system alone, so no edit goes unnoticed.
      newest: the latest time of change, in nanoseconds since 1970.
    """

    digest: str
    newest: int

    def remembered(self, cache_folder: str, compute: Callable[[], str]) -> str:
        """The ASCII text that `compute` made of the files in this state, once, or makes now."""
        memo = pathlib.Path(cache_folder).expanduser() / "fingerprints" / self.digest
        if memo.is_file():
            return memo.read_text(encoding="ascii")
        result = compute()
        if time.time_ns() - self.newest > _CLOCK_TICK_NANOSECONDS:
            write_atomically(memo, result.encode("ascii"))
        return result


def stamp_of(files: Iterable[pathlib.Path], *, reading: Any) -> FileStamp:
    """The state of files.

    Args:
      files: in their order, which is part of the state.
      reading: how they are read, as a value with a `repr`: the same files give other results with another field.

    Raises:
      OSError: a file is not there.
    """
    digest = hashlib.blake2b(repr(reading).encode(), digest_size=16)
    newest = 0
    for file in files:
        status = file.stat()
        newest = max(newest, status.st_ctime_ns)
        state = (os.fsencode(file), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        digest.update(repr(state).encode())
    return FileStamp(digest.hexdigest(), newest)


def files_below(
    root: pathlib.Path, suffixes: tuple[str, ...], skipped_folders: frozenset[str] = frozenset()
) -> tuple[pathlib.Path, ...]:
    """All files below a folder with one of the suffixes (in small letters; the files' may be in capitals), by path.

    Hidden files and folders are left out.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped_folders and not name.startswith(".")]
        wanted = (name for name in names if name.lower().endswith(suffixes) and not name.startswith("."))
        found.extend(path for path in (pathlib.Path(folder, name) for name in wanted) if path.is_file())
    return tuple(sorted(found, key=lambda path: path.relative_to(root).parts))
