"""Encoded images and captions on disk: encoded once, in parts that a stopped run goes on from, then read from it."""

import hashlib
import itertools
import json
import pathlib
import shutil
import time
from collections.abc import Iterator, Sequence

import numpy as np
from absl import logging

from titan.core.config.validate import ConfigError, LocalConfigError
from titan.core.data.corpus import corpus_fingerprint
from titan.core.data.images.config import ImageDataConfig
from titan.core.data.images.encoders import EncodedCaption, Encoders
from titan.core.data.images.fit import decode, fitted
from titan.core.data.images.image_part import EncodedImage, ImagePart, PartEntry, intact_part, write_part
from titan.core.data.images.source import Image, ImageSource
from titan.core.files import write_atomically
from titan.core.progress import progress

# Images in a part: few enough that little is lost when a run is stopped, many enough for few files.
_PART_IMAGES = 64
_COMPLETE = "complete.json"
# What a killed process was writing is removed when it is so old that no process can be writing it still.
_LEFTOVER_SECONDS = 3600


class ImageStore:
    """The images of a source, in its order.

    Attributes:
      hashes: 64-bit hash of each image with its caption; uint64 [num_images].
      content_hashes: the same of each image's file alone.
      grids: rows and columns of patches of each image; int32 [num_images, 2].
      empty_caption: what a caption that was dropped is replaced by.
      fingerprint: of images and encoders together.
    """

    def __init__(self, parts: Sequence[ImagePart], empty_caption: EncodedCaption, fingerprint: str):
        """Initializes the instance.

        Args:
        parts: in order; all but the last are full.
        empty_caption, fingerprint: the attributes.
        """
        self._parts = parts
        self.empty_caption = empty_caption
        self.fingerprint = fingerprint
        self.hashes = np.concatenate([part.hashes for part in parts])
        self.content_hashes = np.concatenate([part.content_hashes for part in parts])
        self.grids = np.concatenate([part.grids for part in parts])

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, number: int) -> EncodedImage:
        part, index = divmod(number, _PART_IMAGES)
        return self._parts[part][index]


def open_image_store(
    source: ImageSource,
    config: ImageDataConfig,
    encoders: Encoders,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> ImageStore:
    """The encoded images, from `data.cache_folder` if they are there, else encoded now and kept there.

    The cache's key is made of the fingerprints of images and encoders and of the size that images get: where one of
    them changes, another folder is written. Parts appear whole, and a start encodes those that lack or are damaged,
    and no others. Processes that share the folder share the work: each encodes its own parts first, and then those that
    still lack.

    Args:
      source: the images.
      config: the `data` section.
      encoders: called only where something is to be encoded.
      process_index, process_count: this process among those that read the data.

    Raises:
      ConfigError: as `ImageSource.images` and `decode`; the files changed meanwhile; the encoders give what is no
        finite number; or the folder does not give back what was written. A LocalConfigError where the image is in
        this process's own parts, and others need not come upon it.
      OSError: the folder cannot be read or written.
    """
    size = (config.resolution, config.max_aspect_ratio)
    parts = repr((2, source.fingerprint, encoders.fingerprint, size, _PART_IMAGES))
    key = hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()
    folder = pathlib.Path(config.cache_folder).expanduser() / f"pictures-{key}"
    num_parts = _num_parts(folder)
    if num_parts and (store := _store(folder, key, num_parts)):
        return store
    logging.info("Encoding %s, kept in %s.", source.description, folder)
    _remove_leftovers(folder)
    if intact_part(_empty_folder(folder)) is None:
        (caption,) = encoders.encode_captions([""])
        nothing = EncodedImage(np.zeros((0, 1), np.float32), 0, 0, caption)
        write_part(_empty_folder(folder), [PartEntry(0, 0, _finite(nothing, "the empty caption"))])
    if process_count > 1:
        try:
            _encode(source, config, encoders, folder, (process_index, process_count))
        except ConfigError as error:
            raise LocalConfigError(*error.args) from error
    num_parts = _encode(source, config, encoders, folder, (0, 1))
    store = _store(folder, key, num_parts)
    if store is None:
        problem = f"{folder} does not give back what was written into it"
        raise ConfigError("data.cache_folder", problem, "give a folder on another disk")
    if corpus_fingerprint(map(int, store.hashes)) != source.fingerprint:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError("data.path", f"{source.description} changed while it was read", "start again")
    write_atomically(folder / _COMPLETE, json.dumps({"num_parts": num_parts}).encode())
    return store


def _num_parts(folder: pathlib.Path) -> int | None:
    """Of a folder that was once complete."""
    try:
        return int(json.loads((folder / _COMPLETE).read_text(encoding="ascii"))["num_parts"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _store(folder: pathlib.Path, key: str, num_parts: int) -> ImageStore | None:
    """The store, if all its parts are there and intact."""
    empty, *parts = map(intact_part, (_empty_folder(folder), *(_part_folder(folder, n) for n in range(num_parts))))
    return None if empty is None or None in parts else ImageStore(parts, empty[0].caption, key)


def _part_folder(folder: pathlib.Path, part: int) -> pathlib.Path:
    return folder / f"part-{part:06d}"


def _empty_folder(folder: pathlib.Path) -> pathlib.Path:
    """The part of one image without patches, which has the empty caption."""
    return folder / "empty"


def _remove_leftovers(folder: pathlib.Path) -> None:
    for leftover in folder.glob(".*-*"):
        try:
            is_old = time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS
        except FileNotFoundError:  # it was none
            continue
        if is_old and leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)


def _encode(
    source: ImageSource, config: ImageDataConfig, encoders: Encoders, folder: pathlib.Path, share: tuple[int, int]
) -> int:
    """Encodes each count-th part that is not there yet, or is damaged; returns the number of all parts."""
    index, count = share
    num_parts = 0
    with progress("encoding images") as work:
        for part, images in enumerate(_batched(source.images())):
            num_parts += 1
            target = _part_folder(folder, part)
            if part % count != index or intact_part(target) is not None:
                continue
            if target.exists():
                logging.warning("%s is damaged; encoding its images again.", target)
            write_part(target, _encoded(images, config, encoders))
            work.advance(len(images))
    return num_parts


def _batched(images: Iterator[Image]) -> Iterator[list[Image]]:
    while batch := list(itertools.islice(images, _PART_IMAGES)):
        yield batch


def _encoded(images: Sequence[Image], config: ImageDataConfig, encoders: Encoders) -> list[PartEntry]:
    captions = encoders.encode_captions([image.caption for image in images])
    entries = []
    for image, caption in zip(images, captions, strict=True):
        pixels = fitted(
            decode(image),
            resolution=config.resolution,
            max_aspect_ratio=config.max_aspect_ratio,
            patch_pixels=encoders.patch_pixels,
        )
        rows, columns = (side // encoders.patch_pixels for side in pixels.shape[:2])
        encoded = EncodedImage(encoders.encode_image(pixels), rows, columns, caption)
        entries.append(PartEntry(image.hash, image.content_hash, _finite(encoded, image.name)))
    return entries


def _finite(image: EncodedImage, name: str) -> EncodedImage:
    for values in (image.latents, image.caption.tokens, image.caption.pooled):
        if not (np.abs(values) <= np.finfo(np.float16).max).all():
            problem = f"what they give for {name} is no finite number in float16"
            raise ConfigError("data.encoders", problem, "give others")
    return image
