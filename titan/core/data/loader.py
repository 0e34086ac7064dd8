"""Batches of packed rows for one host, with a position that can be saved and gone back to."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from titan.core.config.validate import ConfigError
from titan.core.data.config import DataConfig
from titan.core.data.corpus import Corpus
from titan.core.data.packing import PackedRows, empty_rows
from titan.core.data.split import held_out
from titan.core.data.token_store import open_token_store
from titan.core.tokenizer import Tokenizer

# Batches made ahead of the one asked for.
_PREFETCH_BATCHES = 4


class Loader(Iterator[dict[str, np.ndarray]]):
    """Batches of one split of the corpus: dicts of int32 arrays [batch_size / process_count, sequence_length].

    What the arrays mean is said at `PackedRows`. "train" goes on for ever: documents are laid in an order drawn from
    `data.shuffle_seed`, and each epoch has the rows in another order. "validation" is one pass over the held-out
    documents in the corpus's order, its last batch filled up with padding; every `iter()` begins a new pass.

    Batch k is the same for any number of processes: process p has its p-th part, contiguous rows. `data.num_workers`
    threads make batches ahead, and the state is that of the batch last returned.

    Attributes:
      num_documents: documents in the split.
      num_tokens: tokens in the split, with one end of text per document.
      num_rows: rows in an epoch or pass of all processes together.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Tokenizer,
        *,
        split: Literal["train", "validation"],
        batch_size: int,
        sequence_length: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Opens the tokenised corpus, making it at the first use.

        Args:
          data: the `data` section.
          tokenizer: made by `load_tokenizer`.
          split: which documents.
          batch_size: rows in a batch of all processes together.
          sequence_length: tokens in a row.
          process_index: this process, below process_count.
          process_count: processes that read the data.

        Raises:
          ConfigError: as `Corpus`, or the split has no document.
          ValueError: batch_size is not a multiple of process_count.
        """
        if batch_size % process_count:
            raise ValueError(f"a batch of {batch_size} rows cannot be shared equally by {process_count} processes")
        corpus = Corpus(data)
        store = open_token_store(corpus, tokenizer, data.cache_folder)
        is_held_out = held_out(store.hashes, data.validation_fraction)
        documents = np.flatnonzero(is_held_out if split == "validation" else ~is_held_out)
        if not len(documents):
            problem = f"holds out none of the {len(store.hashes)} documents of {corpus.description}"
            cure = "raise it, give more documents, or give --training.validation_interval=0"
            raise ConfigError("data.validation_fraction", problem, cure)
        if split == "train":
            # RandomState's streams are frozen (NEP 19), so the order outlives upgrades of numpy.
            documents = np.random.RandomState(data.shuffle_seed).permutation(documents)
        rows = PackedRows(store.tokens, store.offsets, documents, sequence_length=sequence_length)
        self.num_documents = len(documents)
        self.num_tokens = rows.num_tokens
        self.num_rows = len(rows)
        self._rows = rows
        self._data = data
        self._split = split
        self._batch_size = batch_size
        self._sequence_length = sequence_length
        self._part = (process_index, process_count)
        # What the position counts: flag -> its value, or a fingerprint of what it names. Not the batch size: the
        # position is a row, from which batches of another size can go on.
        self._identity = {
            "data.path": corpus.fingerprint,
            "tokenizer.path": tokenizer.fingerprint,
            "data.validation_fraction": data.validation_fraction,
            "data.shuffle_seed": data.shuffle_seed,
            "training.sequence_length": sequence_length,
        }
        self._next_row = 0
        self._batches: Any = None  # grain's iterator, made when first needed

    def __iter__(self) -> "Loader":
        if self._split == "validation":
            self._seek(0)
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._batches is None:
            self._batches = self._make_batches()
        batch = next(self._batches)
        self._next_row += self._batch_size
        return batch

    def get_state(self) -> bytes:
        """The position after the batch last returned; the same bytes in every process."""
        return json.dumps({"next_row": self._next_row, "split": self._split, "identity": self._identity}).encode()

    def set_state(self, state: bytes) -> None:
        """Goes to a position, so that the next batch is the one after that position.

        Another batch_size, process_count or num_workers than the state was saved with is fine.

        Raises:
          ConfigError: the state belongs to other data; the flag that differs is named.
          ValueError: the bytes are no state of a loader of this split.
        """
        try:
            saved = json.loads(state)
            next_row, split, identity = int(saved["next_row"]), saved["split"], dict(saved["identity"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"not a state of a loader: {state[:80]!r}") from error
        if split != self._split:
            raise ValueError(f"a state of the {split} split was given to a loader of the {self._split} split")
        for flag, value in self._identity.items():
            if identity.get(flag) != value:
                problem = f"the saved data position was counted with {identity.get(flag)!r}, this run has {value!r}"
                raise ConfigError(flag, problem, "restore what it was, or start a new run in another checkpoint folder")
        self._seek(next_row)

    def close(self) -> None:
        """Stops the background threads; a later `next` starts them again at the same position."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _seek(self, next_row: int) -> None:
        self.close()
        self._next_row = next_row

    def _make_batches(self) -> Iterator[dict[str, np.ndarray]]:
        import grain

        rows = grain.MapDataset.source(self._rows)
        if self._split == "train":
            rows = rows.shuffle(seed=self._data.shuffle_seed).repeat()
        source = _Batches(
            rows,
            first_row=self._next_row,
            batch_size=self._batch_size,
            part=self._part,
            sequence_length=self._sequence_length,
        )
        # Threads, not processes: a batch is a few copies out of a memory map, cheaper than to hand between processes.
        num_threads = self._data.num_workers
        read_options = grain.ReadOptions(num_threads, prefetch_buffer_size=max(num_threads, _PREFETCH_BATCHES))
        return iter(grain.MapDataset.source(source).to_iter_dataset(read_options))


class _Batches:
    """One process's part of every batch, by number, from a first row on: a source of random access for grain.

    A batch is a function of its number alone, so its threads may work at several at once.
    """

    def __init__(self, rows: Any, *, first_row: int, batch_size: int, part: tuple[int, int], sequence_length: int):
        process_index, process_count = part
        self._rows = rows
        self._batch_size = batch_size
        self._num_rows_here = batch_size // process_count
        self._first_row_here = first_row + process_index * self._num_rows_here
        self._num_batches = max(0, -(-(len(rows) - first_row) // batch_size))
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        batch = empty_rows((self._num_rows_here, self._sequence_length))
        first = self._first_row_here + index * self._batch_size
        for i, row in enumerate(range(first, min(first + self._num_rows_here, len(self._rows)))):
            for name, values in self._rows[row].items():
                batch[name][i] = values
        return batch
