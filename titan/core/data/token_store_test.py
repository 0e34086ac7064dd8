"""The tokenised corpus: right tokens, tokenised once, never stale, never half there."""

import dataclasses
import pathlib

import numpy as np
import pytest

from titan.core.config.validate import ConfigError
from titan.core.data import token_store
from titan.core.data.corpus import Corpus, document_hash
from titan.core.data.token_store import open_token_store


def test_each_document_is_its_tokens_and_the_end_of_text(small_data, small_tokenizer):
    store = open_token_store(Corpus(small_data), small_tokenizer, small_data.cache_folder)
    documents = list(Corpus(small_data).documents())
    assert len(store.hashes) == len(documents) == 60
    assert store.tokens.dtype == np.uint16
    for i, document in enumerate(documents):
        tokens = store.tokens[store.offsets[i] : store.offsets[i + 1]]
        assert tokens[-1] == small_tokenizer.eos_id
        assert small_tokenizer.eos_id not in tokens[:-1]
        assert small_tokenizer.decode(tokens[:-1]) == document
        assert store.hashes[i] == document_hash(document)


def test_second_opening_tokenises_nothing_and_a_damaged_store_is_made_again(
    small_data, small_tokenizer, tmp_path, monkeypatch
):
    tokens = open_token_store(Corpus(small_data), small_tokenizer, str(tmp_path)).tokens.copy()
    (folder,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(token_store, "_write", lambda *arguments: pytest.fail("tokenised again"))
        open_token_store(Corpus(small_data), small_tokenizer, str(tmp_path))
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(100)
    assert np.array_equal(open_token_store(Corpus(small_data), small_tokenizer, str(tmp_path)).tokens, tokens)
    (folder / "hashes.npy").unlink()
    assert np.array_equal(open_token_store(Corpus(small_data), small_tokenizer, str(tmp_path)).tokens, tokens)
    (folder / "offsets.npy").write_bytes(b"")
    assert np.array_equal(open_token_store(Corpus(small_data), small_tokenizer, str(tmp_path)).tokens, tokens)
    assert list(tmp_path.iterdir()) == [folder]


def test_another_process_may_finish_first(small_data, small_tokenizer, tmp_path, monkeypatch):
    write = token_store._write

    def write_twice(corpus, tokenizer, folder):
        write(corpus, tokenizer, folder)
        monkeypatch.setattr(token_store, "_write", write)
        open_token_store(corpus, tokenizer, str(tmp_path))

    monkeypatch.setattr(token_store, "_write", write_twice)
    store = open_token_store(Corpus(small_data), small_tokenizer, str(tmp_path))
    assert len(store.tokens) == store.offsets[-1]
    assert len(list(tmp_path.iterdir())) == 1


def test_files_that_change_while_read_leave_nothing_behind(small_data, small_tokenizer, tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(pathlib.Path(small_data.path).read_bytes())
    corpus = Corpus(dataclasses.replace(small_data, path=str(file), cache_folder=str(tmp_path / "cache")))
    assert corpus.fingerprint
    file.write_text('{"text": "changed"}')
    with pytest.raises(ConfigError, match=r"corpus\.jsonl changed while it was read; start again"):
        open_token_store(corpus, small_tokenizer, str(tmp_path / "tokens"))
    assert not list((tmp_path / "tokens").iterdir())
