"""Images in files, for the tests of this folder."""

import pytest

from titan.core.data.images.config import ImageDataConfig
from titan.core.data.images.images_for_test import six_images


@pytest.fixture
def data(tmp_path) -> ImageDataConfig:
    """The six images of `six_images`, in `tmp_path / "files"`."""
    return six_images(tmp_path)
