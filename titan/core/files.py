"""Files that appear whole or not at all."""

import contextlib
import os
import pathlib
import tempfile


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Writes `content` to `path`, making its folder; a reader sees the old file or the new one, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
