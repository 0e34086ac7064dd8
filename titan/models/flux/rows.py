"""Images packed into rows of one length: what FLUX.1 takes in, with noise, times and segment ids. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
_DTYPES = {"image_positions": np.int32, "image_segment_ids": np.int32, "text_segment_ids": np.int32}


class PackedImages:
    """The rows of an ordered choice of images.

    A row has as many images, in their order, as there is room for; image p of it has the segment id p + 1. A row is
    a function of its number and of its position in the data, from which noise and times are drawn. Its arrays:

    - latents [I, C]: patches of the images' latents, one image after another; 0 as padding.
    - noise [I, C]: standard normal.
    - timestep [I]: of each token's image, uniform in [0, 1); 0 at padding.
    - image_positions [I, 3]: 0, row and column of the patch in its image.
    - image_segment_ids [I]: image of each token; 0 at padding.
    - text [X, S]: embeddings of the captions' tokens, one caption after another, or of the empty caption's.
    - text_segment_ids [X]: image of each text token; 0 at padding.
    - pooled [P, K]: embedding of each image's whole caption.
    - guidance [P], where the model has such an input.

    Attributes:
      numbers: of the chosen images, in order; [num_images].
    """

    def __init__(
        self,
        store: Any,
        numbers: np.ndarray,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        seed: int,
        caption_dropout: float,
        guidance: float,
    ):
        """Initializes the instance.

        Args:
        store: encoded images, a `titan.core.data.images.image_store.ImageStore`; each must fit into a row, and its
          caption into the P-th part of X.
        numbers: the chosen ones, in order.
        shapes: shape of each array of a row, by name.
        seed: of noise, times and dropout.
        caption_dropout: share of images that get the empty caption.
        guidance: the value of `guidance`.
        """
        self._store = store
        self._shapes = dict(shapes)
        self._seed = seed
        self._caption_dropout = caption_dropout
        self._guidance = guidance
        self._rows = _packed(numbers, store.grids.prod(1), self._shapes["latents"][0], self._shapes["pooled"][0])
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int, position: int) -> Arrays:
        """The arrays of a row where it stands at `position` of the data."""
        # RandomState's streams are frozen (NEP 19): a resumed run sees the same noise after an upgrade of numpy too.
        draw = np.random.RandomState([self._seed, position & 0xFFFFFFFF, position >> 32])
        row = {name: array[0] for name, array in self.padding(1).items()}
        row["noise"][:] = draw.standard_normal(row["noise"].shape)
        if "guidance" in row:
            row["guidance"][:] = self._guidance
        image_begin, text_begin = 0, 0
        for p, image_number in enumerate(self._rows[number]):
            image = self._store[image_number]
            time, is_dropped = draw.random_sample(), draw.random_sample() < self._caption_dropout
            caption = self._store.empty_caption if is_dropped else image.caption
            tokens = slice(image_begin, image_begin + len(image.latents))
            row["latents"][tokens] = image.latents
            row["timestep"][tokens] = time
            row["image_positions"][tokens] = patch_positions(image.rows, image.columns)
            row["image_segment_ids"][tokens] = p + 1
            text = slice(text_begin, text_begin + len(caption.tokens))
            row["text"][text] = caption.tokens
            row["text_segment_ids"][text] = p + 1
            row["pooled"][p] = caption.pooled
            image_begin, text_begin = tokens.stop, text.stop
        return row

    def padding(self, num_rows: int) -> Arrays:
        """Rows of padding alone."""
        return {
            name: np.zeros((num_rows, *shape), _DTYPES.get(name, np.float32)) for name, shape in self._shapes.items()
        }


def patch_positions(rows: int, columns: int) -> np.ndarray:
    """int32 [rows * columns, 3]: 0, row and column of each patch of an image."""
    grid = np.stack(np.meshgrid(0, np.arange(rows), np.arange(columns), indexing="ij"), -1)
    return grid.reshape(-1, 3).astype(np.int32)


def fill_prediction(
    rows: Mapping[str, np.ndarray], row: int, caption: Any, grid: Sequence[int], guidance: float
) -> None:
    """See `titan.models.family.ImageModel.fill_prediction`."""
    num_rows, num_columns = map(int, grid)
    length, text_length = num_rows * num_columns, len(caption.tokens)
    if "guidance" in rows:
        rows["guidance"][row] = guidance
    rows["image_positions"][row, :length] = patch_positions(num_rows, num_columns)
    rows["image_segment_ids"][row, :length] = 1
    rows["text"][row, :text_length] = caption.tokens
    rows["text_segment_ids"][row, :text_length] = 1
    rows["pooled"][row, 0] = caption.pooled


def _packed(numbers: np.ndarray, lengths: np.ndarray, row_length: int, most: int) -> list[list[int]]:
    """Images of each row: an image goes into the last row if there is room, else into a new one."""
    rows: list[list[int]] = []
    filled = row_length
    for number in map(int, numbers):
        if filled + lengths[number] > row_length or len(rows[-1]) == most:
            rows.append([])
            filled = 0
        rows[-1].append(number)
        filled += lengths[number]
    return rows
