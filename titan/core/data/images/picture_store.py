"""Encoded pictures and captions on disk: encoded once, in parts that a stopped run goes on from, then mapped."""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
from absl import logging

from titan.core.config.validate import ConfigError
from titan.core.data.atomic import write_atomically
from titan.core.data.corpus import corpus_fingerprint
from titan.core.data.images.config import PATCH_PIXELS, ImageDataConfig
from titan.core.data.images.encoders import EncodedCaption, Encoders
from titan.core.data.images.fit import decode, fitted
from titan.core.data.images.source import Picture, PictureSource

# Pictures in a part: few enough that little is lost when a run is stopped, many enough for few files.
_PART_PICTURES = 64
_COMPLETE = "complete.json"
_DAMAGED = (OSError, ValueError, TypeError, KeyError, EOFError)


@dataclasses.dataclass(frozen=True)
class EncodedPicture:
    """One picture with its caption, as the model takes them.

    Attributes:
      latents: float16 [rows * columns, C], tokens of patches; mapped from disk.
      rows, columns: of patches.
      caption: its tokens are float16 and mapped from disk.
    """

    latents: np.ndarray
    rows: int
    columns: int
    caption: EncodedCaption


class PictureStore:
    """The pictures of a source, in its order.

    Attributes:
      hashes: 64-bit hash of each picture with its caption; uint64 [num_pictures].
      grids: rows and columns of patches of each picture; int32 [num_pictures, 2].
      empty_caption: what a caption that was dropped is replaced by.
      fingerprint: of pictures and encoders together.
    """

    def __init__(self, folder: pathlib.Path, fingerprint: str):
        """Opens what `open_picture_store` wrote. Raises one of `_DAMAGED` if it is damaged."""
        num_parts = json.loads((folder / _COMPLETE).read_text(encoding="ascii"))["num_parts"]
        self.fingerprint = fingerprint
        self._parts = [_Part(_part_folder(folder, part)) for part in range(num_parts)]
        self.hashes = np.concatenate([part.hashes for part in self._parts])
        self.grids = np.concatenate([part.grids for part in self._parts])
        self.empty_caption = _Part(folder / "empty").caption(0)

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, number: int) -> EncodedPicture:
        part, index = divmod(number, _PART_PICTURES)
        return self._parts[part].picture(index)


class _Part:
    """A folder with some pictures; that of the empty caption has one caption and no picture."""

    def __init__(self, folder: pathlib.Path):
        index = np.load(folder / "index.npz")
        self.hashes, self.grids = index["hashes"], index["grids"]
        self._token_ends, self._pooled = index["token_ends"], index["pooled"]
        self._latent_ends = np.cumsum(self.grids.prod(1))
        self._latents = np.load(folder / "latents.npy", mmap_mode="r") if len(self.grids) else None
        self._tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        if len(self._tokens) != self._token_ends[-1] or (
            self._latents is not None and len(self._latents) != self._latent_ends[-1]
        ):
            raise ValueError(f"the files of {folder} do not belong together")

    def picture(self, index: int) -> EncodedPicture:
        end = self._latent_ends[index]
        rows, columns = map(int, self.grids[index])
        return EncodedPicture(self._latents[end - rows * columns : end], rows, columns, self.caption(index))

    def caption(self, index: int) -> EncodedCaption:
        begin = self._token_ends[index - 1] if index else 0
        return EncodedCaption(self._tokens[begin : self._token_ends[index]], self._pooled[index])


def open_picture_store(
    source: PictureSource,
    config: ImageDataConfig,
    encoders: Encoders,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> PictureStore:
    """The encoded pictures, from `data.cache_folder` if they are there, else encoded now and kept there.

    The cache's key is made of the fingerprints of pictures and encoders and of the size that pictures get, so it cannot
    be stale. Parts appear whole, and a start goes on behind those that are there. Processes that share the folder
    share the work: each encodes its own parts first, and then those that still lack.

    Args:
      source: the pictures.
      config: the `data` section.
      encoders: called only where something is to be encoded.
      process_index, process_count: this process among those that read the data.

    Raises:
      ConfigError: as `PictureSource.pictures` and `decode`; the files changed meanwhile; or the encoders give what is
        no finite number.
    """
    size = (config.resolution, config.max_aspect_ratio)
    parts = repr((1, source.fingerprint, encoders.fingerprint, size, _PART_PICTURES))
    key = hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()
    folder = pathlib.Path(config.cache_folder).expanduser() / f"pictures-{key}"
    if (folder / _COMPLETE).exists():
        try:
            return PictureStore(folder, key)
        except _DAMAGED as error:
            logging.warning("%s is damaged (%s); encoding the pictures again.", folder, error)
            shutil.rmtree(folder)
    logging.info("Encoding %s, kept in %s.", source.description, folder)
    if not (folder / "empty").exists():
        _write_part(folder / "empty", [], [], encoders.encode_captions([""]))
    num_parts = 0
    for is_own_turn in (True, False) if process_count > 1 else (False,):
        num_parts = _encode(source, config, encoders, folder, (process_index, process_count) if is_own_turn else (0, 1))
    hashes = np.concatenate([_Part(_part_folder(folder, part)).hashes for part in range(num_parts)])
    if corpus_fingerprint(map(int, hashes)) != source.fingerprint:
        shutil.rmtree(folder)
        raise ConfigError("data.path", f"{source.description} changed while it was read", "start again")
    write_atomically(folder / _COMPLETE, json.dumps({"num_parts": num_parts}).encode())
    return PictureStore(folder, key)


def _part_folder(folder: pathlib.Path, part: int) -> pathlib.Path:
    return folder / f"part-{part:06d}"


def _encode(
    source: PictureSource, config: ImageDataConfig, encoders: Encoders, folder: pathlib.Path, share: tuple[int, int]
) -> int:
    """Encodes each count-th part that is not there yet; returns the number of all parts."""
    index, count = share
    num_parts = 0
    for part, pictures in enumerate(_batched(source.pictures())):
        num_parts += 1
        target = _part_folder(folder, part)
        if part % count == index and not target.exists():
            pixels = [
                fitted(decode(picture), resolution=config.resolution, max_aspect_ratio=config.max_aspect_ratio)
                for picture in pictures
            ]
            latents = [encoders.encode_picture(image) for image in pixels]
            captions = encoders.encode_captions([picture.caption for picture in pictures])
            grids = [(image.shape[0] // PATCH_PIXELS, image.shape[1] // PATCH_PIXELS) for image in pixels]
            hashes = [picture.hash for picture in pictures]
            _write_part(target, list(zip(hashes, grids)), latents, captions)
    return num_parts


def _batched(pictures: Iterator[Picture]) -> Iterator[list[Picture]]:
    while batch := list(itertools.islice(pictures, _PART_PICTURES)):
        yield batch


def _write_part(
    target: pathlib.Path,
    pictures: Sequence[tuple[int, tuple[int, int]]],
    latents: Sequence[np.ndarray],
    captions: Sequence[EncodedCaption],
) -> None:
    for values in (*latents, *(array for caption in captions for array in (caption.tokens, caption.pooled))):
        if not np.abs(values).max() <= np.finfo(np.float16).max:
            raise ConfigError(
                "data.encoders", f"what they give for {target.name} is no finite number in float16", "give others"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        if latents:
            np.save(temporary / "latents.npy", np.concatenate(latents).astype(np.float16))
        np.save(temporary / "tokens.npy", np.concatenate([caption.tokens for caption in captions]).astype(np.float16))
        np.savez(
            temporary / "index.npz",
            hashes=np.array([hash_ for hash_, _ in pictures], np.uint64),
            grids=np.array([grid for _, grid in pictures], np.int32).reshape(-1, 2),
            token_ends=np.cumsum([len(caption.tokens) for caption in captions]),
            pooled=np.stack([caption.pooled for caption in captions]).astype(np.float32),
        )
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
