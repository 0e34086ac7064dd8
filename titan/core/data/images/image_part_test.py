"""A part on disk: whatever happens to the bytes of its files, it is found damaged, or is read."""

import numpy as np
import pytest

from titan.core.data.images.encoders import EncodedCaption
from titan.core.data.images.image_part import EncodedImage, PartEntry, intact_part, write_part


@pytest.fixture
def folder(tmp_path):
    caption = EncodedCaption(np.ones((3, 2), np.float32), np.ones(2, np.float32))
    image = EncodedImage(np.ones((6, 4), np.float32), 2, 3, caption)
    write_part(tmp_path / "part", [PartEntry(2**64 - 1, 5, image), PartEntry(7, 5, image)])
    return tmp_path / "part"


def test_it_gives_back_what_was_written(folder):
    part = intact_part(folder)
    assert part.hashes.tolist() == [2**64 - 1, 7] and part.content_hashes.tolist() == [5, 5]
    assert part.grids.tolist() == [[2, 3], [2, 3]]
    assert [part[n].latents.shape for n in range(2)] == [(6, 4), (6, 4)]
    assert [part[n].caption.tokens.shape for n in range(2)] == [(3, 2), (3, 2)]


@pytest.mark.filterwarnings("ignore")  # of Python, about what it finds in headers
@pytest.mark.parametrize("name", ["index", "latents", "tokens", "pooled"])
def test_files_that_were_cut_off_or_overwritten_raise_nothing(folder, name):
    file = folder / f"{name}.npy"
    content = file.read_bytes()
    assert intact_part(folder) is not None
    for length in range(len(content)):
        file.write_bytes(content[:length])
        assert intact_part(folder) is None, length
    draw = np.random.default_rng(0)
    header = content.index(b"\n")
    for _ in range(100):
        changed = bytearray(content)
        for position in draw.integers(0, header, 3):
            changed[position] = draw.integers(0, 256)
        file.write_bytes(changed)
        intact_part(folder)


def test_no_folder_is_no_part(tmp_path):
    assert intact_part(tmp_path / "missing") is None
