"""A part of the encoded images on disk: a folder that appears whole, is checked when opened, and is read in pieces.

No file stays open, so that the number of images is not bound by that of open files.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import tempfile
import tokenize
from collections.abc import Sequence

import numpy as np

from titan.core.data.images.encoders import EncodedCaption

_ARRAYS = ("latents", "tokens", "pooled")
_INDEX = np.dtype([("hash", "<u8"), ("content_hash", "<u8"), ("grid", "<i4", (2,)), ("token_end", "<i8")])
# What NumPy raises for a file that lacks or was cut off or overwritten. Other OSErrors say nothing about the content.
_DAMAGED = (FileNotFoundError, EOFError, ValueError, TypeError, IndexError, SyntaxError, tokenize.TokenError)


@dataclasses.dataclass(frozen=True)
class EncodedImage:
    """One image with its caption, as the model takes them.

    Attributes:
      latents: float16 [rows * columns, C], tokens of patches.
      rows, columns: of patches.
      caption: its tokens are float16.
    """

    latents: np.ndarray
    rows: int
    columns: int
    caption: EncodedCaption


@dataclasses.dataclass(frozen=True)
class PartEntry:
    """An image of a part that is to be written: `ImagePart` says what the hashes are."""

    hash: int
    content_hash: int
    image: EncodedImage


class ImagePart:
    """The images of a folder that `write_part` wrote.

    Attributes:
      hashes: of each image with its caption; uint64 [num_images].
      content_hashes: of each image's file alone; uint64 [num_images].
      grids: rows and columns of patches of each image; int32 [num_images, 2].
    """

    def __init__(self, folder: pathlib.Path):
        """Reads the index and checks that the other files belong to it; see `intact_part` for what it raises."""
        self._folder = folder
        index = np.array(self._file("index"))
        if index.dtype != _INDEX or not len(index):
            raise ValueError(f"{folder} has no index")
        self.hashes, self.content_hashes, self.grids = index["hash"], index["content_hash"], index["grid"]
        self._ends = {
            "latents": np.cumsum(self.grids.prod(1)),
            "tokens": index["token_end"],
            "pooled": np.arange(1, len(index) + 1),
        }
        for name, ends in self._ends.items():
            if len(self._file(name)) != ends[-1]:
                raise ValueError(f"the files of {folder} do not belong together")

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, index: int) -> EncodedImage:
        latents, tokens, pooled = (self._piece(name, index) for name in _ARRAYS)
        rows, columns = map(int, self.grids[index])
        return EncodedImage(latents, rows, columns, EncodedCaption(tokens, pooled[0]))

    def _piece(self, name: str, index: int) -> np.ndarray:
        ends = self._ends[name]
        return np.array(self._file(name)[ends[index - 1] if index else 0 : ends[index]])

    def _file(self, name: str) -> np.ndarray:
        return np.load(self._folder / f"{name}.npy", mmap_mode="r")


def intact_part(folder: pathlib.Path) -> ImagePart | None:
    """The part in a folder; None where there is none or it is damaged.

    Raises:
      OSError: its files are there and cannot be read, as for want of permission: no reason to write them again.
    """
    try:
        return ImagePart(folder)
    except _DAMAGED:
        return None


def write_part(folder: pathlib.Path, entries: Sequence[PartEntry]) -> None:
    """Writes a part, in place of a damaged one if there is one; one that another process wrote meanwhile is kept."""
    images = [entry.image for entry in entries]
    captions = [image.caption for image in images]
    token_ends = np.cumsum([len(caption.tokens) for caption in captions])
    arrays = {
        "index": np.array(
            [
                (entry.hash, entry.content_hash, (entry.image.rows, entry.image.columns), end)
                for entry, end in zip(entries, token_ends, strict=True)
            ],
            _INDEX,
        ),
        "latents": np.concatenate([image.latents for image in images]).astype(np.float16),
        "tokens": np.concatenate([caption.tokens for caption in captions]).astype(np.float16),
        "pooled": np.stack([caption.pooled for caption in captions]).astype(np.float32),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        for name, array in arrays.items():
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        _sync(temporary)
        _put_in_place(temporary, folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(temporary: pathlib.Path, folder: pathlib.Path) -> None:
    try:
        temporary.rename(folder)
        return
    except OSError:
        if not folder.is_dir():
            raise
    if intact_part(folder) is not None:  # another process was first
        return
    aside = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        with contextlib.suppress(FileNotFoundError):  # another process has moved it
            folder.rename(aside)
        _put_in_place(temporary, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sync(folder: pathlib.Path) -> None:
    """Has the names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
