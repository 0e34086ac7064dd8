"""The cache of encoded pictures: what it gives back, what it goes on from, and when it is made anew."""

import dataclasses
import pathlib

import numpy as np
import pytest

from titan.core.config.validate import ConfigError
from titan.core.data.images import picture_store
from titan.core.data.images.picture_store import open_picture_store
from titan.core.data.images.pictures_for_test import TellingEncoders, png
from titan.core.data.images.source import PictureSource


def _open(data, encoders, **share):
    return open_picture_store(PictureSource(data), data, encoders, **share)


def data_cache(data):
    return pathlib.Path(data.cache_folder)


@pytest.fixture(autouse=True)
def parts_of_two(monkeypatch):
    monkeypatch.setattr(picture_store, "_PART_PICTURES", 2)


def test_it_gives_back_what_the_encoders_gave(data):
    store = _open(data, TellingEncoders())
    assert len(store) == 6
    for number in range(6):
        picture = store[number]
        # Greys of whole pictures are exact in float16 within its 2^-11.
        np.testing.assert_allclose(picture.latents, 40 * number / 255, rtol=2**-11)
        assert picture.latents.shape == (picture.rows * picture.columns, 4)
        assert bytes(picture.caption.tokens[:, 0].astype(np.uint8)) == f"caption {number}\0".encode()
        assert picture.caption.pooled.tolist() == [9, 9]
    assert store.grids[:3].tolist() == [[4, 4], [3, 5], [5, 3]]
    assert store.empty_caption.tokens.tolist() == [[0, 0, 0]]


def test_pictures_are_encoded_once(data):
    encoders = TellingEncoders()
    for _ in range(2):
        _open(data, encoders)
    assert encoders.num_pictures == 6
    _open(dataclasses.replace(data, resolution=32), encoders)
    assert encoders.num_pictures == 12


def test_a_stopped_start_is_gone_on_from(data, monkeypatch):
    encode = TellingEncoders.encode_picture

    def stopping(self, pixels):
        if self.num_pictures == 3:
            raise KeyboardInterrupt
        return encode(self, pixels)

    monkeypatch.setattr(TellingEncoders, "encode_picture", stopping)
    with pytest.raises(KeyboardInterrupt):
        _open(data, TellingEncoders())
    monkeypatch.undo()
    monkeypatch.setattr(picture_store, "_PART_PICTURES", 2)
    encoders = TellingEncoders()
    assert len(_open(data, encoders)) == 6
    assert encoders.num_pictures == 4  # the first part of two was there


def test_processes_that_share_a_folder_share_the_work(data):
    others = TellingEncoders()
    source = PictureSource(data)
    key_folder = None

    class Watching(TellingEncoders):
        """Has the other process encode its part when this one is at its first picture."""

        def encode_picture(self, pixels):
            nonlocal key_folder
            if key_folder is None:
                (key_folder,) = (path.parent for path in data_cache(data).glob("pictures-*/empty"))
                picture_store._encode(source, data, others, key_folder, (1, 2))
            return super().encode_picture(pixels)

    encoders = Watching()
    assert len(_open(data, encoders, process_index=0, process_count=2)) == 6
    assert (encoders.num_pictures, others.num_pictures) == (4, 2)


def test_a_damaged_cache_is_made_anew(data):
    _open(data, TellingEncoders())
    (tokens, *_) = data_cache(data).glob("pictures-*/part-000001/tokens.npy")
    tokens.write_bytes(tokens.read_bytes()[:-6])
    encoders = TellingEncoders()
    assert bytes(_open(data, encoders)[3].caption.tokens[:, 0].astype(np.uint8)) == b"caption 3\0"
    assert encoders.num_pictures == 6


def test_pictures_that_change_while_they_are_read_are_refused(data, tmp_path):
    source = PictureSource(data)
    assert source.fingerprint
    (tmp_path / "files/p1.png").write_bytes(png(20, 20, 7))
    with pytest.raises(ConfigError, match="changed while it was read; start again"):
        open_picture_store(source, data, TellingEncoders())
    assert not list(data_cache(data).glob("pictures-*"))


def test_what_is_no_number_is_refused(data, monkeypatch):
    monkeypatch.setattr(TellingEncoders, "encode_picture", lambda self, pixels: np.full((16, 4), 1e6, np.float32))
    with pytest.raises(ConfigError, match="data.encoders: what they give for part-000000 is no finite number in float"):
        _open(data, TellingEncoders())
    assert not list(data_cache(data).glob("pictures-*/part-*"))
