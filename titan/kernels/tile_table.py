"""Tuned block sizes as data: one JSON file for each kernel and TPU generation, written by `//tools:tune_kernel`.

A file maps a key, which the kernel derives from its shapes and attributes, to block sizes by name. Tables of the
repository lie in `tiles/` beside this file; the folder that TITAN_TILE_TABLES names, if any, is searched first.
"""

import functools
import json
import logging
import os
import pathlib

_log = logging.getLogger(__name__)

FOLDER_VARIABLE = "TITAN_TILE_TABLES"
_PACKAGED = pathlib.Path(__file__).parent / "tiles"


def lookup(kernel: str, generation: str, key: str) -> dict[str, int] | None:
    """The tuned block sizes of a kernel for a shape, or None if it was never tuned there; that is logged once.

    Raises:
      ValueError: a table cannot be read, naming the file.
    """
    for folder in _folders():
        tiles = read_table(folder / file_name(kernel, generation)).get(key)
        if tiles is not None:
            return tiles
    if generation:
        _log_miss(kernel, generation, key)
    return None


def file_name(kernel: str, generation: str) -> str:
    """The name of the table's file."""
    return f"{kernel}.{generation}.json"


@functools.cache
def read_table(path: pathlib.Path) -> dict[str, dict[str, int]]:
    """A table; empty where there is no file.

    Raises:
      ValueError: the file is no table.
    """
    try:
        table = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no tile table: {error}; write it anew with //tools:tune_kernel") from error
    valid = isinstance(table, dict) and all(
        isinstance(tiles, dict) and all(isinstance(size, int) for size in tiles.values()) for tiles in table.values()
    )
    if not valid:
        raise ValueError(
            f"{path} is no tile table: it must map keys to block sizes; write it anew with //tools:tune_kernel"
        )
    return table


def write_table(path: pathlib.Path, table: dict[str, dict[str, int]]) -> None:
    """Writes a table, or replaces it whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(dict(sorted(table.items())), indent=2) + "\n")
    temporary.replace(path)
    read_table.cache_clear()


def _folders() -> list[pathlib.Path]:
    user = os.environ.get(FOLDER_VARIABLE)
    return [pathlib.Path(user).expanduser(), _PACKAGED] if user else [_PACKAGED]


@functools.cache
def _log_miss(kernel: str, generation: str, key: str) -> None:
    _log.info("%s: no tuned tiles for %s on %s; the defaults are used", kernel, key, generation)
