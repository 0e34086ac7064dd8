"""The pictures of a run: encoded, and one loader for training and one for validation."""

import dataclasses
import functools

from titan.core.data.images.encoders import Encoders
from titan.core.data.images.image_store import PictureStore, open_picture_store
from titan.core.data.images.loader import PictureLoader
from titan.core.data.images.source import PictureSource
from titan.train.config.run import Config
from titan.train.images.release_encoders import ReleaseEncoders
from titan.train.images.trial_encoders import TrialEncoders


@dataclasses.dataclass(frozen=True)
class Pictures:
    """What a run on pictures reads.

    Attributes:
      encoders: made the store, and turn samples into pictures.
      store: all pictures.
      train, validation: loaders; the latter is None where validation is off.
    """

    encoders: Encoders
    store: PictureStore
    train: PictureLoader
    validation: PictureLoader | None


def open_pictures(config: Config, *, process_index: int, process_count: int) -> Pictures:
    """Opens the pictures; the first time it encodes them.

    Args:
      process_index, process_count: this process among those that read the data.

    Raises:
      ConfigError: pictures or encoders cannot be read, or do not suit the model.
    """
    data, model = config.data, config.model
    if data.encoders:
        encoders = ReleaseEncoders(data.encoders, model, cache_folder=data.cache_folder)
    else:
        encoders = TrialEncoders(model)
    store = open_picture_store(
        PictureSource(data), data, encoders, process_index=process_index, process_count=process_count
    )
    loader = functools.partial(
        PictureLoader,
        data,
        store,
        {tensor.name: tensor.shape for tensor in model.batch_tensors(config.training.sequence_length)},
        batch_size=config.training.batch_size,
        process_index=process_index,
        process_count=process_count,
    )
    validation = loader(split="validation") if config.training.validation_interval else None
    return Pictures(encoders, store, loader(split="train"), validation)
