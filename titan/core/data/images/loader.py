"""Batches of packed pictures for one host."""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from titan.core.config.validate import ConfigError
from titan.core.data.images.config import ImageDataConfig
from titan.core.data.images.image_store import PictureStore
from titan.core.data.images.packed_images import PackedPictures
from titan.core.data.row_loader import RowLoader
from titan.core.data.split import held_out

# What tells the noise of validation from that of training at the same position.
_VALIDATION_SEED = 0x5EED


class PictureLoader(RowLoader):
    """Batches of one split of the pictures; what the arrays mean is said at `PackedPictures`.

    "train" goes through the pictures in an order drawn from `data.shuffle_seed`, with other noise, times and dropped
    captions in each epoch. "validation" is one pass over the held-out pictures, with the same noise and times in every
    pass and all captions.

    Attributes:
      pictures: the rows.
    """

    def __init__(
        self,
        data: ImageDataConfig,
        store: PictureStore,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        split: Literal["train", "validation"],
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Args:
          data: the `data` section.
          store: all pictures, encoded.
          shapes: shape of each array of a row, by name.
          split: which pictures.
          batch_size, process_index, process_count: see `RowLoader`.

        Raises:
          ConfigError: the split has no picture.
        """
        is_training = split == "train"
        # A picture with several captions is several pictures of the store, all of one split.
        is_held_out = held_out(store.content_hashes, data.validation_fraction)
        numbers = np.flatnonzero(~is_held_out if is_training else is_held_out)
        if not len(numbers):
            raise ConfigError(
                "data.validation_fraction",
                f"holds out none of the {len(store)} pictures",
                "raise it, give more pictures, or give --training.validation_interval=0",
            )
        if is_training:
            numbers = np.random.RandomState(data.shuffle_seed).permutation(numbers)
        self.pictures = PackedPictures(
            store,
            numbers,
            shapes,
            seed=data.shuffle_seed if is_training else data.shuffle_seed ^ _VALIDATION_SEED,
            caption_dropout=data.caption_dropout if is_training else 0.0,
            guidance=data.guidance,
        )
        super().__init__(
            num_rows=len(self.pictures),
            make_row=self.pictures.row,
            make_padding=self.pictures.padding,
            identity={
                "data.path": store.fingerprint,
                "data.validation_fraction": data.validation_fraction,
                "data.shuffle_seed": data.shuffle_seed,
                "model.pictures_per_row": shapes["pooled"][0],
                "training.sequence_length": shapes["latents"][0] + shapes["text"][0],
            },
            split=split,
            shuffle_seed=data.shuffle_seed,
            num_workers=data.num_workers,
            batch_size=batch_size,
            process_index=process_index,
            process_count=process_count,
        )
