"""A small corpus, its tokenizer and their settings, for the tests of this folder."""

import json
import random

import pytest

from titan.core.data.config import DataConfig, TokenizerConfig
from titan.core.data.corpus import Corpus
from titan.core.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def small_data(tmp_path_factory) -> DataConfig:
    """60 documents of 1 to 400 words: of sequences of tens of tokens, some hold several and some a part of one."""
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    words = [f"word{i}" for i in range(50)]
    texts = [" ".join(draw.choices(words, k=draw.choice((1, 5, 30, 400)))) + f" #{i}" for i in range(60)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return DataConfig(path=str(folder / "corpus.jsonl"), validation_fraction=0.2, cache_folder=str(folder / "cache"))


@pytest.fixture(scope="session")
def small_tokenizer(small_data, tmp_path_factory):
    """A tokenizer of 300 ids trained on `small_data`."""
    corpus = Corpus(small_data)
    config = TokenizerConfig(vocab_size=300, cache_folder=str(tmp_path_factory.mktemp("tokenizers")))
    return load_tokenizer(config, corpus.documents, corpus.fingerprint)
