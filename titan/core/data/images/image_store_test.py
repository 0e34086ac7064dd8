"""The cache of encoded images: what it gives back, what it goes on from, and when it is made anew."""

import contextlib
import dataclasses
import errno
import os
import pathlib
import resource
from unittest.mock import Mock

import numpy as np
import pytest

from titan.core.config.validate import ConfigError, LocalConfigError
from titan.core.data.images import image_store
from titan.core.data.images.image_store import open_image_store
from titan.core.data.images.images_for_test import TellingEncoders, png
from titan.core.data.images.source import ImageSource
from titan.core.progress import progress


def _open(data, encoders, **share):
    return open_image_store(ImageSource(data), data, encoders, **share)


def data_cache(data):
    return pathlib.Path(data.cache_folder)


@pytest.fixture(autouse=True)
def parts_of_two(monkeypatch):
    monkeypatch.setattr(image_store, "_PART_IMAGES", 2)


def test_it_gives_back_what_the_encoders_gave(data):
    store = _open(data, TellingEncoders())
    assert len(store) == 6
    for number in range(6):
        image = store[number]
        # Greys of whole images are exact in float16 within its 2^-11.
        np.testing.assert_allclose(image.latents, 40 * number / 255, rtol=2**-11)
        assert image.latents.shape == (image.rows * image.columns, 4)
        assert bytes(image.caption.tokens[:, 0].astype(np.uint8)) == f"caption {number}\0".encode()
        assert image.caption.pooled.tolist() == [9, 9]
    assert store.grids[:3].tolist() == [[4, 4], [3, 5], [5, 3]]
    assert store.empty_caption.tokens.tolist() == [[0, 0, 0]]


def test_images_are_encoded_once(data):
    encoders = TellingEncoders()
    for _ in range(2):
        _open(data, encoders)
    assert encoders.num_images == 6
    _open(dataclasses.replace(data, resolution=32), encoders)
    assert encoders.num_images == 12


def test_a_stopped_start_is_gone_on_from(data, monkeypatch):
    encode = TellingEncoders.encode_image

    def stopping(self, pixels):
        if self.num_images == 3:
            raise KeyboardInterrupt
        return encode(self, pixels)

    monkeypatch.setattr(TellingEncoders, "encode_image", stopping)
    with pytest.raises(KeyboardInterrupt):
        _open(data, TellingEncoders())
    monkeypatch.undo()
    monkeypatch.setattr(image_store, "_PART_IMAGES", 2)
    encoders = TellingEncoders()
    assert len(_open(data, encoders)) == 6
    assert encoders.num_images == 4  # the first part of two was there


def test_processes_that_share_a_folder_share_the_work(data):
    others = TellingEncoders()
    source = ImageSource(data)
    key_folder = None

    class Watching(TellingEncoders):
        """Has the other process encode its part when this one is at its first image."""

        def encode_image(self, pixels):
            nonlocal key_folder
            if key_folder is None:
                (key_folder,) = (path.parent for path in data_cache(data).glob("pictures-*/empty"))
                image_store._encode(source, data, others, key_folder, (1, 2))
            return super().encode_image(pixels)

    encoders = Watching()
    assert len(_open(data, encoders, process_index=0, process_count=2)) == 6
    assert (encoders.num_images, others.num_images) == (4, 2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda part: (part / "tokens.npy").write_bytes((part / "tokens.npy").read_bytes()[:-6]),
        lambda part: (part / "tokens.npy").write_bytes(b""),
        lambda part: (part / "index.npy").write_bytes((part / "index.npy").read_bytes()[:50]),
        lambda part: (part / "index.npy").write_bytes(bytes(500)),
        lambda part: (part / "latents.npy").unlink(),
    ],
)
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_damaged_part_alone_is_encoded_again(data, damage, is_complete):
    _open(data, TellingEncoders())
    (part,) = data_cache(data).glob("pictures-*/part-000001")
    damage(part)
    if not is_complete:
        (part.parent / "complete.json").unlink()
    encoders = TellingEncoders()
    assert bytes(_open(data, encoders)[3].caption.tokens[:, 0].astype(np.uint8)) == b"caption 3\0"
    assert encoders.num_images == 2
    assert sorted(path.name for path in part.parent.iterdir()) == [
        "complete.json", "empty", "part-000000", "part-000001", "part-000002"
    ]  # fmt: skip


def test_more_images_than_files_may_be_open(data):
    _open(data, TellingEncoders())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(list(pathlib.Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 3, limits[1]))
    try:
        encoders = TellingEncoders()
        store = _open(data, encoders)
        images = [store[number] for number in range(6)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert encoders.num_images == 0
    assert all(len(image.latents) == image.rows * image.columns for image in images)


def test_what_cannot_be_read_for_another_reason_is_left_alone(data, monkeypatch):
    _open(data, TellingEncoders())
    monkeypatch.setattr(np, "load", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    encoders = TellingEncoders()
    with pytest.raises(OSError, match="Too many open files"):
        _open(data, encoders)
    monkeypatch.undo()
    monkeypatch.setattr(image_store, "_PART_IMAGES", 2)
    _open(data, encoders)
    assert encoders.num_images == 0


def test_processes_that_repair_the_same_part_both_end_well(data):
    _open(data, TellingEncoders())
    (part,) = data_cache(data).glob("pictures-*/part-000001")
    (part / "tokens.npy").write_bytes(b"")
    others = TellingEncoders()

    class Watching(TellingEncoders):
        """Has the other process repair all when this one has begun to."""

        def encode_image(self, pixels):
            if not others.num_images:
                _open(data, others)
            return super().encode_image(pixels)

    encoders = Watching()
    assert len(_open(data, encoders)) == len(_open(data, TellingEncoders())) == 6
    assert (encoders.num_images, others.num_images) == (2, 2)


def test_progress_counts_the_images(data, monkeypatch):
    works = []

    @contextlib.contextmanager
    def recorded(name):
        with progress(name) as work:
            works.append(work)
            yield work

    monkeypatch.setattr(image_store, "progress", recorded)
    _open(data, TellingEncoders())
    _open(data, TellingEncoders())  # nothing to encode
    assert [(work.name, work.done) for work in works] == [("encoding images", 6)]


def test_a_process_says_what_is_wrong_with_its_own_share(data, tmp_path):
    (tmp_path / "files/p2.png").write_bytes(png(20, 20, 7)[:40])
    with pytest.raises(LocalConfigError, match="p2.png is no intact image"):
        _open(data, TellingEncoders(), process_index=1, process_count=2)


def test_what_killed_processes_left_is_removed_when_it_is_old(data):
    _open(data, TellingEncoders())
    (folder,) = data_cache(data).glob("pictures-*")
    old, young = folder / ".part-000000-old", folder / ".part-000000-young"
    for leftover in (old, young):
        leftover.mkdir()
        (leftover / "tokens.npy").write_bytes(b"x")
    os.utime(old, (0, 0))
    (folder / "complete.json").unlink()
    _open(data, TellingEncoders())
    assert not old.exists() and young.exists()


def test_images_that_change_while_they_are_read_are_refused(data, tmp_path):
    source = ImageSource(data)
    assert source.fingerprint
    (tmp_path / "files/p1.png").write_bytes(png(20, 20, 7))
    with pytest.raises(ConfigError, match="changed while it was read; start again"):
        open_image_store(source, data, TellingEncoders())
    assert not list(data_cache(data).glob("pictures-*"))


def test_what_is_no_number_is_refused(data, monkeypatch):
    monkeypatch.setattr(TellingEncoders, "encode_image", lambda self, pixels: np.full((16, 4), 1e6, np.float32))
    with pytest.raises(ConfigError, match="data.encoders: what they give for .*p0.png is no finite number in float"):
        _open(data, TellingEncoders())
    assert not list(data_cache(data).glob("pictures-*/part-*"))
