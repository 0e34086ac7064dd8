"""How far samples are from the images trained on: a figure beside the loss that says whether they are of their kind."""

import math
from collections.abc import Sequence

import numpy as np

from titan.core.data.images.image_store import ImageStore

_MOST_IMAGES = 4096


class TrainingDistances:
    """Distances of latents to the nearest image trained on, relative to those of held-out images.

    A sample that is a copy of an image trained on has a distance of 0; samples that are as near to these as images are
    that the model has never seen, about 1; noise, much more. For large data the first 4,096 images stand for all.
    """

    def __init__(self, store: ImageStore, trained: Sequence[int], held_out: Sequence[int]):
        """Initializes the instance.

        Args:
          store: all images, encoded.
          trained: numbers of the images trained on.
          held_out: numbers of the others; without any there is nothing to compare with, and all distances are NaN.
        """
        self._store = store
        self._trained: dict[tuple[int, int], np.ndarray] = {}
        for grid, numbers in self._by_grid(trained[:_MOST_IMAGES]).items():
            self._trained[grid] = np.stack([self._latents(number) for number in numbers])
        nearest = [self._nearest(self._latents(number), self._grid(number)) for number in held_out[:_MOST_IMAGES]]
        self._unit = _mean(nearest)

    def of(self, latents: Sequence[np.ndarray], numbers: Sequence[int]) -> float:
        """The mean of the samples' distances to the nearest image, over that of held-out images; NaN without any.

        Args:
          latents: of samples, float32 [tokens, channels] each, padding at the end included.
          numbers: for each an image of the store with its size.
        """
        nearest = []
        for sample, number in zip(latents, numbers, strict=True):
            length = math.prod(self._grid(number))
            nearest.append(self._nearest(np.asarray(sample[:length], np.float32).ravel(), self._grid(number)))
        return _mean(nearest) / self._unit if self._unit else math.nan

    def _nearest(self, latents: np.ndarray, grid: tuple[int, int]) -> float:
        """Root mean square over the elements; NaN where no image trained on has this size."""
        if grid not in self._trained:
            return math.nan
        return float(np.sqrt(np.square(self._trained[grid] - latents).mean(1).min()))

    def _latents(self, number: int) -> np.ndarray:
        return np.asarray(self._store[number].latents, np.float32).ravel()

    def _grid(self, number: int) -> tuple[int, int]:
        rows, columns = map(int, self._store.grids[number])
        return rows, columns

    def _by_grid(self, numbers: Sequence[int]) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for number in numbers:
            found.setdefault(self._grid(number), []).append(int(number))
        return found


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
