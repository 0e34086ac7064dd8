"""Validation by sampling: images that the model draws for captions of the data, as one grid."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from titan.train.images.distances import TrainingDistances
from titan.train.images.euler import euler, sampling_times
from titan.train.images.open_images import Images
from titan.train.runtime.compiled_step import Executable
from titan.train.runtime.run import Run
from titan.train.sharding.mesh_axes import data_share
from titan.train.step.state import PARAMS

_MARGIN_PIXELS = 4


class Sampler:
    """Draws a grid of images with the weights of a run.

    The images have the sizes and captions of some of the data, held-out ones first, and each a row of its own. All
    grids of a run begin from the same noise.

    Attributes:
      distance: of the grid drawn last from the images trained on, see `TrainingDistances.of`; NaN before the first.
    """

    def __init__(self, run: Run, images: Images):
        """Initializes the instance.

        Args:
        run: with a `predict_step`.
        images: of the run.
        """
        self.distance = math.nan
        self._run, self._encoders, self._store = run, images.encoders, images.store
        self._config = run.config.sampling
        loaders = [loader for loader in (images.validation, images.train) if loader is not None]
        numbers = [number for loader in loaders for number in loader.images.numbers]
        self._numbers = numbers[: self._config.num_images]
        guides = self._config.classifier_free_guidance != 1.0
        captions = [self._store[number].caption for number in self._numbers]
        self._captions = [*captions, *[self._store.empty_caption] * (len(captions) if guides else 0)]
        self._share = data_share(run.mesh, run.runtime.device_processes, run.runtime.process_index)
        parallelism = run.config.parallelism
        # Every device has the same number of rows; those beyond the captions are padding.
        self._num_rows = math.ceil(len(self._captions) / parallelism.num_batch_shares) * parallelism.num_batch_shares
        self._fixed = self._conditions()
        held_out = images.validation.images.numbers if images.validation is not None else []
        self._distances = TrainingDistances(self._store, images.train.images.numbers, held_out)

    def prepare(self) -> None:
        """Compiles what a grid needs."""
        num_rows = len(self._captions)
        self._executable(self._batch(np.zeros((num_rows, *self._shape("noised")), np.float32), np.ones(num_rows)))

    def sample(self, state: Mapping[str, Any]) -> np.ndarray:
        """The grid, uint8 [height, width, 3], in rows of about as many images as there are rows.

        Args:
          state: of the run; every process must call it.
        """
        weights = {name: tensor for name, tensor in state.items() if name.startswith(PARAMS)}
        num_images, scale = len(self._numbers), self._config.classifier_free_guidance

        def velocity(samples: np.ndarray, times: np.ndarray) -> np.ndarray:
            repeats = len(self._captions) // num_images
            batch = self._batch(np.tile(samples, (repeats, 1, 1)), np.tile(times, repeats))
            executable = self._executable(batch)
            outputs = executable(weights, executable.place(batch))[1]
            predicted = self._run.runtime.fetch(outputs)["prediction"][: len(self._captions)]
            if repeats == 1:
                return predicted
            for_captions, for_empty = predicted[:num_images], predicted[num_images:]
            return for_empty + scale * (for_captions - for_empty)

        noise = np.random.RandomState(self._config.seed).standard_normal((num_images, *self._shape("noised")))
        lengths = [int(self._store.grids[number].prod()) for number in self._numbers]
        times = [
            sampling_times(self._config.num_steps, schedule=self._config.schedule, image_length=length)
            for length in lengths
        ]
        latents = euler(velocity, noise.astype(np.float32), times)
        self.distance = self._distances.of(latents, self._numbers)
        grids = [map(int, self._store.grids[number]) for number in self._numbers]
        return tiled(
            [
                self._encoders.decode_image(tokens[:length], rows=rows, columns=columns)
                for tokens, length, (rows, columns) in zip(latents, lengths, grids, strict=True)
            ]
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        return next(tensor.shape for tensor in self._run.prediction_tensors if tensor.name == name)

    def _executable(self, batch: Mapping[str, np.ndarray]) -> Executable:
        return self._run.predict_step.executable_for(batch)

    def _conditions(self) -> dict[str, np.ndarray]:
        """All that does not change from step to step, for the rows of all processes."""
        rows = {
            tensor.name: np.zeros((self._num_rows, *tensor.shape), tensor.dtype)
            for tensor in self._run.prediction_tensors
        }
        for row, caption in enumerate(self._captions):
            grid = self._store.grids[self._numbers[row % len(self._numbers)]]
            self._run.config.model.images().fill_prediction(rows, row, caption, grid, self._config.guidance)
        return rows

    def _batch(self, samples: np.ndarray, times: np.ndarray) -> dict[str, np.ndarray]:
        """This process's part of the rows, as a step takes it: [1, rows, ...]."""
        rows = {**self._fixed, **{name: self._fixed[name].copy() for name in ("noised", "timestep")}}
        is_image = rows["image_segment_ids"][: len(samples), :, None] != 0
        rows["noised"][: len(samples)] = np.where(is_image, samples, 0.0)
        rows["timestep"][: len(samples)] = times[:, None]
        index, count = self._share
        num_rows = self._num_rows // count
        return {name: array[None, index * num_rows : (index + 1) * num_rows] for name, array in rows.items()}


def tiled(images: list[np.ndarray]) -> np.ndarray:
    """uint8 images [height, width, 3] of different sizes on one black sheet, left to right and top to bottom."""
    columns = math.ceil(len(images) ** 0.5)
    height = max(image.shape[0] for image in images) + _MARGIN_PIXELS
    width = max(image.shape[1] for image in images) + _MARGIN_PIXELS
    sheet = np.zeros((math.ceil(len(images) / columns) * height, columns * width, 3), np.uint8)
    for number, image in enumerate(images):
        top, left = number // columns * height, number % columns * width
        sheet[top : top + image.shape[0], left : left + image.shape[1]] = image
    return sheet
