"""The distance of samples: 0 for copies, 1 for what is as far away as held-out images, more for noise."""

import math
import types

import numpy as np
import pytest

from titan.train.images.distances import TrainingDistances


class _Store:
    """Images of 2x2 tokens with 3 channels, and one of 1x4."""

    def __init__(self, latents):
        self._latents = latents
        self.grids = np.array([[2, 2]] * (len(latents) - 1) + [[1, 4]])

    def __getitem__(self, number):
        return types.SimpleNamespace(latents=self._latents[number])


@pytest.fixture
def store():
    # Trained on 0 to 3, at 0, 10, 20, 30 in every element; held out 4 and 5, at 12 and 26; 6 has another shape.
    return _Store([np.full((4, 3), value, np.float16) for value in (0, 10, 20, 30, 12, 26, 5)])


def _sample(value):
    return np.concatenate([np.full((4, 3), value), np.full((2, 3), 1e3)]).astype(np.float32)  # with padding


def test_the_unit_is_the_distance_of_held_out_images(store):
    distances = TrainingDistances(store, [0, 1, 2, 3], [4, 5])  # 2 from 10, 4 from 30: 3 on average
    assert distances.of([_sample(10)], [0]) == 0
    assert distances.of([_sample(16)], [0]) == pytest.approx(4 / 3)
    assert distances.of([_sample(16), _sample(30)], [0, 1]) == pytest.approx(2 / 3)
    assert distances.of([_sample(-90)], [4]) == pytest.approx(30)


def test_sizes_that_nothing_was_trained_on_do_not_count(store):
    distances = TrainingDistances(store, [0, 1, 2, 3], [4, 5, 6])
    assert distances.of([_sample(16), _sample(16)], [0, 6]) == pytest.approx(4 / 3)
    assert math.isnan(distances.of([_sample(16)], [6]))


def test_without_held_out_images_there_is_no_unit(store):
    assert math.isnan(TrainingDistances(store, [0, 1], []).of([_sample(1)], [0]))
