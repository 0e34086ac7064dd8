"""Batches of packed images for one host."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import numpy as np

from titan.core.config.validate import ConfigError
from titan.core.data.images.config import ImageDataConfig
from titan.core.data.images.image_store import ImageStore
from titan.core.data.row_loader import RowLoader
from titan.core.data.split import held_out

# What tells the noise of validation from that of training at the same position.
_VALIDATION_SEED = 0x5EED


class ImageRows(Protocol):
    """Rows of chosen images, as a model takes them in.

    Attributes:
      numbers: of the chosen images, in order; int [num_images].
    """

    numbers: np.ndarray

    def __len__(self) -> int:
        """Rows in one pass over the images."""

    def row(self, number: int, position: int) -> dict[str, np.ndarray]:
        """The arrays of a row, where it stands at `position` of the data."""

    def padding(self, num_rows: int) -> dict[str, np.ndarray]:
        """Rows of padding alone."""


class ImageLoader(RowLoader):
    """Batches of one split of the images, in rows as the model packs them.

    "train" goes through the images in an order drawn from `data.shuffle_seed`, with other noise, times and dropped
    captions in each epoch. "validation" is one pass over the held-out images, with the same noise and times in every
    pass and all captions.

    Attributes:
      images: the rows.
    """

    def __init__(
        self,
        data: ImageDataConfig,
        store: ImageStore,
        pack: Callable[..., ImageRows],
        *,
        row_identity: Mapping[str, Any],
        split: Literal["train", "validation"],
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Initializes the instance.

        Args:
          data: the `data` section.
          store: all images, encoded.
          pack: makes the rows: (numbers, seed=, caption_dropout=, guidance=), of which seed is that of noise, times and
            dropout, and caption_dropout the share of images that get the empty caption.
          row_identity: what a row's content depends on besides the data: flag -> its value.
          split: which images.
          batch_size, process_index, process_count: see `RowLoader`.

        Raises:
          ConfigError: the split has no image.
        """
        is_training = split == "train"
        # An image with several captions is several images of the store, all of one split.
        is_held_out = held_out(store.content_hashes, data.validation_fraction)
        numbers = np.flatnonzero(~is_held_out if is_training else is_held_out)
        if not len(numbers):
            raise ConfigError(
                "data.validation_fraction",
                f"holds out none of the {len(store)} images",
                "raise it, give more images, or give --training.validation_interval=0",
            )
        if is_training:
            numbers = np.random.RandomState(data.shuffle_seed).permutation(numbers)
        self.images = pack(
            numbers,
            seed=data.shuffle_seed if is_training else data.shuffle_seed ^ _VALIDATION_SEED,
            caption_dropout=data.caption_dropout if is_training else 0.0,
            guidance=data.guidance,
        )
        super().__init__(
            num_rows=len(self.images),
            make_row=self.images.row,
            make_padding=self.images.padding,
            identity={
                "data.path": store.fingerprint,
                "data.validation_fraction": data.validation_fraction,
                "data.shuffle_seed": data.shuffle_seed,
                **row_identity,
            },
            split=split,
            shuffle_seed=data.shuffle_seed,
            num_workers=data.num_workers,
            batch_size=batch_size,
            process_index=process_index,
            process_count=process_count,
        )
