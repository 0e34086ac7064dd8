"""The data of a run: one loader for training and one for validation."""

import dataclasses
from typing import TYPE_CHECKING

from titan.core.config.validate import ConfigError
from titan.core.data.corpus import Corpus
from titan.core.data.loader import Loader
from titan.core.data.row_loader import RowLoader
from titan.core.tokenizer import load_tokenizer
from titan.train.config.run import Config

if TYPE_CHECKING:
    from titan.train.images.open_images import Images


@dataclasses.dataclass(frozen=True)
class RunData:
    """What a run reads. `validation` is None where validation is off, `images` where it reads text."""

    train: RowLoader
    validation: RowLoader | None
    images: "Images | None" = None


def open_data(config: Config, *, process_index: int, process_count: int) -> RunData:
    """Opens the corpus, or the images; the first time it trains the tokenizer and tokenises, or encodes them.

    Args:
      process_index, process_count: this process among those that read the data.

    Raises:
      ConfigError: the data, the tokenizer or the encoders cannot be read, or do not suit the model.
    """
    image_model = config.model.images()
    if image_model is not None:
        from titan.train.images.open_images import open_images

        images = open_images(
            config.data, image_model, config.training, process_index=process_index, process_count=process_count
        )
        return RunData(images.train, images.validation, images)
    corpus = Corpus(config.data)
    tokenizer = load_tokenizer(config.tokenizer, corpus.documents, corpus.fingerprint)
    if tokenizer.vocab_size > config.model.num_token_ids():
        raise ConfigError(
            "model.vocab_size",
            f"{config.model.num_token_ids()} is less than the tokenizer's {tokenizer.vocab_size} token ids",
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
