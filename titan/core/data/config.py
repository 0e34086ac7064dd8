"""Flags of the training text and of its tokenizer. Imports nothing heavy: flags are parsed before grain is needed."""

import dataclasses
from typing import ClassVar

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError, check_exists, check_writable_folder


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where documents come from, which of them are held out, and in which order they are read."""

    kind: ClassVar[str] = "documents"
    path: str = option(
        "",
        "Text, JSONL (.jsonl, .ndjson) or Parquet file, or a folder of them. "
        "Empty: the Python standard library's source.",
    )
    text_field: str = option("text", "Field of a JSONL line, or column of a Parquet file, that holds the document.")
    validation_fraction: float = option(
        0.05,
        "Share of the documents held out for validation, chosen by a hash of their text.",
        minimum=0.0,
        maximum=0.9,
    )
    shuffle_seed: int = option(0, "Seed of the order of the training sequences.", minimum=0, maximum=2**32 - 1)
    num_workers: int = option(1, "Threads that make batches ahead. 0: a batch is made when it is asked for.", minimum=0)
    max_documents: int = option(0, "Number of documents read, from the first one on. 0: all.", minimum=0)
    cache_folder: str = option("~/.cache/titan/data", "Folder of tokenised corpora; may be deleted between runs.")

    def validate(self) -> None:
        """Raises ConfigError where the corpus cannot be read or the cache not be written."""
        if self.path:
            check_exists("data.path", self.path)
        if not self.text_field:
            raise ConfigError("data.text_field", "the name is empty", "name the field that holds the text")
        check_writable_folder("data.cache_folder", self.cache_folder)


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """A tokenizer to load, or else to train on the corpus."""

    path: str = option(
        "",
        "Hugging Face tokenizer.json, or the folder that holds it. Empty: train a byte-level BPE on the corpus, "
        "held-out documents included, once.",
    )
    vocab_size: int = option(
        4096,
        "Number of token ids of the trained BPE, at least 256 bytes and the end of text; unused with a path.",
        minimum=257,
    )
    cache_folder: str = option("~/.cache/titan/tokenizers", "Folder of trained tokenizers.")

    def validate(self) -> None:
        """Raises ConfigError where the tokenizer cannot be read or the cache not be written."""
        if self.path:
            check_exists("tokenizer.path", self.path)
        else:
            check_writable_folder("tokenizer.cache_folder", self.cache_folder)
