"""The tokenizer: exact round trips, training once, loading what others wrote, and the messages about bad files."""

import json
import shutil

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from titan.core.config.validate import ConfigError
from titan.core.data.config import TokenizerConfig
from titan.core.tokenizer import END_OF_TEXT, Tokenizer, load_tokenizer

DOCUMENTS = [
    "def f(x):\n    return x + 1\n" * 20,
    "the quick brown fox jumps over the lazy dog. " * 20,
    "naïve café 日本語",
]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TokenizerConfig:
    """Settings for a BPE of 300 ids."""
    return TokenizerConfig(vocab_size=300, cache_folder=str(tmp_path_factory.mktemp("tokenizers")))


@pytest.fixture(scope="module")
def trained(config) -> Tokenizer:
    """The BPE that `config` gives on DOCUMENTS."""
    return load_tokenizer(config, lambda: DOCUMENTS, "fingerprint")


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back_exactly(trained, text):
    ids = trained.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert trained.decode(ids) == text


def test_trained_vocabulary(trained):
    assert trained.vocab_size == 300
    assert 0 <= trained.eos_id < 300
    assert trained.decode([trained.eos_id]) == END_OF_TEXT
    assert len(trained.encode("the quick brown fox")) < len("the quick brown fox") / 2


def test_end_of_text_in_a_document_is_only_characters(trained):
    text = f"before {END_OF_TEXT} after"
    ids = trained.encode(text)
    assert trained.eos_id not in ids
    assert trained.decode(ids) == text


def test_batches_are_encoded_as_single_texts(trained):
    for ids, text in zip(trained.encode_batch([*DOCUMENTS, ""]), [*DOCUMENTS, ""], strict=True):
        np.testing.assert_array_equal(ids, trained.encode(text))


def test_training_is_done_once_and_gives_the_same_file_again(config, trained, tmp_path):
    again = load_tokenizer(config, lambda: pytest.fail("trained again"), "fingerprint")
    assert again.path == trained.path
    elsewhere = TokenizerConfig(vocab_size=300, cache_folder=str(tmp_path))
    assert load_tokenizer(elsewhere, lambda: DOCUMENTS, "fingerprint").path.read_bytes() == trained.path.read_bytes()
    other = load_tokenizer(elsewhere, lambda: ["other text " * 50], "other fingerprint")
    assert other.fingerprint != trained.fingerprint


def test_damaged_cache_is_trained_again(config, trained, tmp_path):
    own = TokenizerConfig(vocab_size=300, cache_folder=str(tmp_path))
    path = load_tokenizer(own, lambda: DOCUMENTS, "fingerprint").path
    path.write_bytes(path.read_bytes()[:1000])
    assert load_tokenizer(own, lambda: DOCUMENTS, "fingerprint").fingerprint == trained.fingerprint


def test_small_corpus_gives_a_small_vocabulary(tmp_path):
    config = TokenizerConfig(vocab_size=4096, cache_folder=str(tmp_path))
    tokenizer = load_tokenizer(config, lambda: ["abc"], "abc")
    assert 257 <= tokenizer.vocab_size < 270
    assert tokenizer.decode(tokenizer.encode("日本")) == "日本"


def write_word_tokenizer(folder, *words: str) -> None:
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("settings", "eos"),
    [
        ({"eos_token": "stop"}, "stop"),
        ({"eos_token": {"content": "stop", "lstrip": False}}, "stop"),
        ({"eos_token": None}, "</s>"),
        (None, "</s>"),
    ],
)
@pytest.mark.parametrize("given_as", ["file", "folder"])
def test_loads_what_others_wrote(tmp_path, settings, eos, given_as):
    write_word_tokenizer(tmp_path, "unknown", "a", "b", "</s>", "stop")
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    path = tmp_path / "tokenizer.json" if given_as == "file" else tmp_path
    tokenizer = load_tokenizer(TokenizerConfig(path=str(path)), lambda: pytest.fail("trained"), "")
    assert tokenizer.encode("a b a b").tolist() == [1, 2, 1, 2]  # not truncated
    assert tokenizer.decode([tokenizer.eos_id]) == eos
    assert tokenizer.vocab_size == 5
    assert tokenizer.path == tmp_path / "tokenizer.json"


def test_loading_a_trained_file_gives_the_same_tokenizer(trained, tmp_path):
    shutil.copy(trained.path, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(TokenizerConfig(path=str(tmp_path)), list, "")
    assert (loaded.fingerprint, loaded.eos_id, loaded.vocab_size) == (trained.fingerprint, trained.eos_id, 300)


def test_bad_files_are_one_line_that_says_where(tmp_path):
    def message() -> str:
        with pytest.raises(ConfigError) as caught:
            load_tokenizer(TokenizerConfig(path=str(tmp_path)), list, "")
        return str(caught.value)

    file = tmp_path / "tokenizer.json"
    assert message() == (
        f"--tokenizer.path: there is no file {file}; give a tokenizer.json or the folder that holds it"
    )
    file.write_text("{}")
    assert message().startswith(f"--tokenizer.path: {file}: not a tokenizers file (")
    write_word_tokenizer(tmp_path, "unknown", "a")
    assert "its vocabulary has no end-of-text token '<|end_of_text|>' or '<|endoftext|>' or" in message()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    assert "its vocabulary has no end-of-text token '<stop>'; give a tokenizers file, with its" in message()
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert message().startswith(f"--tokenizer.path: {tmp_path / 'tokenizer_config.json'}: not a JSON object (")
