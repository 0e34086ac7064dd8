"""The loader: each epoch has every token once, hosts share batches, and a restored position goes on exactly."""

import dataclasses
import itertools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from titan.core.config.validate import ConfigError
from titan.core.data.corpus import Corpus
from titan.core.data.loader import Loader
from titan.core.data.packing import IGNORED_LABEL
from titan.core.data.token_store import open_token_store

SEQUENCE_LENGTH = 48


def make(data, tokenizer, split="train", batch_size=4, **options) -> Loader:
    options = {"sequence_length": SEQUENCE_LENGTH} | options
    return Loader(data, tokenizer, split=split, batch_size=batch_size, **options)


def take(loader, num_batches) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(loader, num_batches))


def assert_equal(batches, expected):
    assert len(batches) == len(expected)
    for batch, expected_batch in zip(batches, expected, strict=True):
        assert batch.keys() == expected_batch.keys()
        for name, values in batch.items():
            np.testing.assert_array_equal(values, expected_batch[name])


def row_set(batches) -> list[tuple]:
    """Rows in sorted order: equal for equal collections of rows."""
    names = sorted(batches[0])
    return sorted(
        tuple(np.concatenate([batch[name][i] for name in names]).tolist())
        for batch in batches
        for i in range(len(batch["tokens"]))
    )


def real_tokens(batches) -> np.ndarray:
    return np.sort(np.concatenate([batch["tokens"][batch["segment_ids"] > 0] for batch in batches]))


def test_each_epoch_has_each_training_row_once_in_another_order(small_data, small_tokenizer):
    loader = make(small_data, small_tokenizer, batch_size=1)
    first, second = take(loader, loader.num_rows), take(loader, loader.num_rows)
    assert row_set(first) == row_set(second)
    assert any(not np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(first, second, strict=True))
    assert len(real_tokens(first)) == loader.num_tokens


def test_splits_share_no_document_and_together_are_the_corpus(small_data, small_tokenizer):
    train = make(small_data, small_tokenizer, batch_size=1)
    validation = make(small_data, small_tokenizer, "validation", batch_size=1)
    store = open_token_store(Corpus(small_data), small_tokenizer, small_data.cache_folder)
    assert 0 < validation.num_documents < train.num_documents
    assert validation.num_documents + train.num_documents == len(store.hashes)
    together = np.concatenate([real_tokens(take(train, train.num_rows)), real_tokens(list(validation))])
    np.testing.assert_array_equal(np.sort(together), np.sort(store.tokens))


def test_validation_is_a_finite_pass_begun_anew_by_each_iter(small_data, small_tokenizer):
    loader = make(small_data, small_tokenizer, "validation", batch_size=4)
    batches = list(loader)
    assert len(batches) == -(-loader.num_rows // 4)
    assert_equal(list(loader), batches)
    take(loader, 1)
    assert_equal(list(loader), batches)
    num_padding_rows = len(batches) * 4 - loader.num_rows
    assert 0 < num_padding_rows
    padding = {name: values[-num_padding_rows:] for name, values in batches[-1].items()}
    assert not padding["segment_ids"].any()
    assert (padding["labels"] == IGNORED_LABEL).all()


def test_labels_are_the_next_token_and_the_last_token_predicts_the_end_of_text(small_data, small_tokenizer):
    batches = take(make(small_data, small_tokenizer), 20)
    eos = small_tokenizer.eos_id
    for batch in batches:
        tokens, labels, segments = batch["tokens"], batch["labels"], batch["segment_ids"]
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        np.testing.assert_array_equal(labels[:, :-1][same], tokens[:, 1:][same])
        np.testing.assert_array_equal(labels == IGNORED_LABEL, (tokens == eos) | (segments == 0))
    assert any((batch["labels"] == eos).any() for batch in batches)
    assert any((batch["segment_ids"] > 1).any() for batch in batches)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_processes_share_each_batch_without_overlap(small_data, small_tokenizer, split):
    num_batches = 2 * make(small_data, small_tokenizer).num_rows // 4 + 3  # beyond two epochs
    whole = take(make(small_data, small_tokenizer, split), num_batches)
    parts = [
        take(make(small_data, small_tokenizer, split, process_index=i, process_count=2), num_batches) for i in range(2)
    ]
    assert all(batch["tokens"].shape == (2, SEQUENCE_LENGTH) for batch in parts[0])
    joined = [{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in zip(parts[0], parts[1], strict=True)]
    assert_equal(joined, whole)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("process", [(0, 1), (1, 2)])
def test_restored_position_goes_on_as_if_never_interrupted(small_data, small_tokenizer, num_workers, process):
    data = dataclasses.replace(small_data, num_workers=num_workers)
    options = {"process_index": process[0], "process_count": process[1]}
    batches_in_epoch = make(data, small_tokenizer).num_rows // 4
    stops = (0, 1, batches_in_epoch // 2, batches_in_epoch, 2 * batches_in_epoch + 1)
    uninterrupted = make(data, small_tokenizer, **options)
    states, batches = [uninterrupted.get_state()], []
    for _ in range(stops[-1] + 5):
        batches.append(next(uninterrupted))
        states.append(uninterrupted.get_state())
    assert len(set(states)) == len(states)
    for stop in stops:
        restored = make(data, small_tokenizer, **options)
        next(restored)  # a position that must be forgotten, with batches made ahead
        restored.set_state(states[stop])
        assert restored.get_state() == states[stop]
        assert_equal(take(restored, 5), batches[stop : stop + 5])


def test_state_holds_for_other_process_counts_and_batch_sizes(small_data, small_tokenizer):
    loader = make(small_data, small_tokenizer, process_index=1, process_count=2)
    take(loader, 3)
    other = make(small_data, small_tokenizer, batch_size=6)
    other.set_state(loader.get_state())
    rows = np.concatenate([batch["tokens"] for batch in take(make(small_data, small_tokenizer, batch_size=2), 9)])
    np.testing.assert_array_equal(next(other)["tokens"], rows[12:18])


def test_order_follows_the_seed(small_data, small_tokenizer):
    expected = take(make(small_data, small_tokenizer), 5)
    assert_equal(take(make(small_data, small_tokenizer), 5), expected)
    other = take(make(dataclasses.replace(small_data, shuffle_seed=1), small_tokenizer), 5)
    assert not any(np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(other, expected, strict=True))


@pytest.mark.parametrize(
    ("data_changes", "options", "flag"),
    [
        ({"shuffle_seed": 5}, {}, "data.shuffle_seed"),
        ({"max_documents": 30}, {}, "data.path"),
        ({"validation_fraction": 0.3}, {}, "data.validation_fraction"),
        ({}, {"sequence_length": 32}, "training.sequence_length"),
    ],
)
def test_state_of_other_data_is_refused_by_flag(small_data, small_tokenizer, data_changes, options, flag):
    state = make(small_data, small_tokenizer).get_state()
    other = make(dataclasses.replace(small_data, **data_changes), small_tokenizer, **options)
    with pytest.raises(ConfigError, match=f"^--{flag}: the saved data position was counted with .+, this run has"):
        other.set_state(state)


@pytest.mark.parametrize("state", [b"", b"\x00\xff", b"[]", b"{}", json.dumps({"next_row": "x"}).encode()])
def test_damaged_state_is_a_value_error(small_data, small_tokenizer, state):
    with pytest.raises(ValueError, match="not a state of a loader"):
        make(small_data, small_tokenizer).set_state(state)


def test_state_of_the_other_split_is_refused(small_data, small_tokenizer):
    state = make(small_data, small_tokenizer, "validation").get_state()
    with pytest.raises(ValueError, match="a state of the validation split was given to a loader of the train split"):
        make(small_data, small_tokenizer).set_state(state)


def test_bad_sizes_and_empty_splits_say_so(small_data, small_tokenizer):
    with pytest.raises(ValueError, match="a batch of 3 rows cannot be shared equally by 2 processes"):
        make(small_data, small_tokenizer, batch_size=3, process_count=2)
    with pytest.raises(ConfigError, match=r"--data\.validation_fraction: holds out none of the 60 documents"):
        make(dataclasses.replace(small_data, validation_fraction=0.0), small_tokenizer, "validation")


def test_a_corpus_smaller_than_a_batch_repeats(small_data, small_tokenizer):
    loader = make(dataclasses.replace(small_data, max_documents=1), small_tokenizer, sequence_length=4096)
    assert loader.num_rows == 1
    tokens = next(loader)["tokens"]
    assert (tokens == tokens[0]).all()
    assert tokens[0].any()


def test_close_ends_the_threads_and_the_loader_can_go_on(small_data, small_tokenizer):
    expected = take(make(small_data, small_tokenizer), 4)
    loader = make(small_data, small_tokenizer)
    threads_before = set(threading.enumerate())
    batches = take(loader, 2)
    started = set(threading.enumerate()) - threads_before
    assert started
    loader.close()
    for thread in started:
        thread.join(timeout=300)
        assert not thread.is_alive()
    assert_equal(batches + take(loader, 2), expected)


def test_importing_needs_none_of_the_heavy_packages():
    code = (
        "import sys; import titan.core.data.config; assert 'numpy' not in sys.modules;"
        "import titan.core.data.loader, titan.core.tokenizer;"
        "heavy = {'grain', 'jax', 'torch', 'tokenizers', 'pyarrow', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
