"""The data of a run: its tokenizer, and one loader for training and one for validation."""

import dataclasses

from titan.core.config.validate import ConfigError
from titan.core.data.corpus import Corpus
from titan.core.data.loader import Loader
from titan.core.tokenizer import Tokenizer, load_tokenizer
from titan.train.config import Config


@dataclasses.dataclass(frozen=True)
class RunData:
    """What a run reads. `validation` is None where validation is off."""

    tokenizer: Tokenizer
    train: Loader
    validation: Loader | None


def open_data(config: Config, *, process_index: int, process_count: int) -> RunData:
    """Opens the corpus; the first time it trains the tokenizer and tokenises.

    Args:
      process_index, process_count: this process among those that read the data.

    Raises:
      ConfigError: the corpus or the tokenizer cannot be read, or the tokenizer has more ids than the model.
    """
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

    return RunData(tokenizer, loader("train"), loader("validation") if config.training.validation_interval else None)
