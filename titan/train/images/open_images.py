"""The images of a run: encoded, and one loader for training and one for validation."""

import dataclasses
import functools

from titan.core.data.images.config import ImageDataConfig
from titan.core.data.images.encoders import Encoders
from titan.core.data.images.image_store import ImageStore, open_image_store
from titan.core.data.images.loader import ImageLoader
from titan.core.data.images.source import ImageSource
from titan.core.registry import load
from titan.models.family import ImageModel
from titan.train.config.training import TrainingConfig


@dataclasses.dataclass(frozen=True)
class Images:
    """What a run on images reads.

    Attributes:
      encoders: made the store, and turn samples into images.
      store: all images.
      train, validation: loaders; the latter is None where validation is off.
    """

    encoders: Encoders
    store: ImageStore
    train: ImageLoader
    validation: ImageLoader | None


def open_images(
    data: ImageDataConfig, model: ImageModel, training: TrainingConfig, *, process_index: int, process_count: int
) -> Images:
    """Opens the images; the first time it encodes them.

    Args:
      data: the section `data`.
      model: what takes the images in.
      training: the section `training`.
      process_index: this process among those that read the data.
      process_count: how many these are.

    Raises:
      ConfigError: images or encoders cannot be read, or do not suit the model.
    """
    if data.encoders:
        encoders = load(model.release_encoders)(data.encoders, model, cache_folder=data.cache_folder)
    else:
        encoders = load(model.trial_encoders)(model)
    store = open_image_store(
        ImageSource(data), data, encoders, process_index=process_index, process_count=process_count
    )
    loader = functools.partial(
        ImageLoader,
        data,
        store,
        lambda numbers, **options: model.rows(store, numbers, training.sequence_length, **options),
        row_identity={
            "model.images_per_row": model.images_per_row,
            "training.sequence_length": training.sequence_length,
        },
        batch_size=training.batch_size,
        process_index=process_index,
        process_count=process_count,
    )
    validation = loader(split="validation") if training.validation_interval else None
    return Images(encoders, store, loader(split="train"), validation)
