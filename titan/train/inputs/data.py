"""The data of a run: one loader for training and one for validation."""

import dataclasses
from typing import TYPE_CHECKING

from titan.core.config.validate import ConfigError
from titan.core.data.corpus import Corpus
from titan.core.data.images.config import ImageDataConfig
from titan.core.data.loader import Loader
from titan.core.data.row_loader import RowLoader
from titan.core.tokenizer import load_tokenizer
from titan.train.config.run import Config

if TYPE_CHECKING:
    from titan.train.images.open_images import Pictures


@dataclasses.dataclass(frozen=True)
class RunData:
    """What a run reads. `validation` is None where validation is off, `pictures` where it reads text."""

    train: RowLoader
    validation: RowLoader | None
    pictures: "Pictures | None" = None


def open_data(config: Config, *, process_index: int, process_count: int) -> RunData:
    """Opens the corpus, or the pictures; the first time it trains the tokenizer and tokenises, or encodes them.

    Args:
      process_index, process_count: this process among those that read the data.

    Raises:
      ConfigError: the data, the tokenizer or the encoders cannot be read, or do not suit the model.
    """
    if isinstance(config.data, ImageDataConfig):
        from titan.train.images.open_images import open_pictures

        pictures = open_pictures(config, process_index=process_index, process_count=process_count)
        return RunData(pictures.train, pictures.validation, pictures)
    corpus = Corpus(config.data)
    tokenizer = load_tokenizer(config.tokenizer, corpus.documents, corpus.fingerprint)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"{config.model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size} token ids",
            f"give at least {tokenizer.vocab_size}, or another --tokenizer.path",
        )

    def loader(split: str) -> Loader:
        return Loader(
            config.data,
            tokenizer,
            split=split,
            batch_size=config.training.batch_size,
            sequence_length=config.training.sequence_length,
            process_index=process_index,
            process_count=process_count,
        )

    return RunData(loader("train"), loader("validation") if config.training.validation_interval else None)
