"""The sizes that images are brought to."""

import numpy as np
import PIL.Image
import pytest

from titan.core.data.images.fit import fitted, trained_size


@pytest.mark.parametrize("resolution", [64, 256, 1024])
@pytest.mark.parametrize("size", [(1, 1), (640, 480), (480, 640), (1000, 100), (333, 1000), (16, 4000)])
def test_a_size_is_of_whole_patches_about_the_form_and_never_too_large(size, resolution):
    width, height = trained_size(*size, resolution=resolution, max_aspect_ratio=2.0, patch_pixels=16)
    assert width % 16 == 0 and height % 16 == 0
    assert 0.7 * resolution**2 <= width * height <= resolution**2
    wanted = min(max(size[0] / size[1], 0.5), 2.0)
    assert width / height == pytest.approx(wanted, rel=0.5 * 16 / min(width, height) * 2)


def test_squares_alone():
    assert trained_size(640, 480, resolution=128, max_aspect_ratio=1.0, patch_pixels=16) == (128, 128)


def test_what_does_not_fit_is_cut_off_on_both_sides():
    pixels = np.zeros((100, 300, 3), np.uint8)
    pixels[:, 100:200] = 200
    square = fitted(PIL.Image.fromarray(pixels), resolution=64, max_aspect_ratio=1.0, patch_pixels=16)
    assert square.shape == (64, 64, 3)
    assert square[:, 4:-4].min() == 200
