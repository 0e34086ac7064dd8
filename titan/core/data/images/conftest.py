"""Pictures in files, for the tests of this folder."""

import pytest

from titan.core.data.images.config import ImageDataConfig
from titan.core.data.images.images_for_test import png


@pytest.fixture
def data(tmp_path) -> ImageDataConfig:
    """Six pictures of different forms and greys with captions, for squares of 64x64 pixels, in `tmp_path / "files"`."""
    folder = tmp_path / "files"
    folder.mkdir()
    for number, (width, height) in enumerate(((64, 64), (200, 100), (100, 200), (30, 30), (640, 100), (65, 63))):
        (folder / f"p{number}.png").write_bytes(png(width, height, 40 * number))
        (folder / f"p{number}.txt").write_text(f"caption {number}\n")
    return ImageDataConfig(path=str(folder), resolution=64, cache_folder=str(tmp_path / "cache"))
