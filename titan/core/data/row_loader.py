"""Batches of rows for one host, with a position that can be saved and gone back to."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from titan.core.config.validate import ConfigError

Arrays = dict[str, np.ndarray]

# Batches made ahead of the one asked for.
_PREFETCH_BATCHES = 4


class RowLoader(Iterator[Arrays]):
    """Batches of one split of the data: dicts of arrays [batch_size / process_count, ...].

    "train" goes on for ever, each epoch with the rows in another order. "validation" is one pass over the rows in their
    own order, its last batch filled up with padding; every `iter()` begins a new pass.

    Batch k is the same for any number of processes: process p has its p-th part, contiguous rows. Threads make batches
    ahead, and the state is that of the batch last returned.

    Attributes:
      num_rows: rows in an epoch or pass of all processes together.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        make_row: Callable[[int, int], Mapping[str, np.ndarray]],
        make_padding: Callable[[int], Arrays],
        identity: Mapping[str, Any],
        split: Literal["train", "validation"],
        shuffle_seed: int,
        num_workers: int,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Initializes the instance.

        Args:
          num_rows: rows in an epoch or pass.
          make_row: (row, position) to the arrays of a row, a function of these numbers alone; threads call it. The
            position counts the rows of all epochs, so that a row may be another at each of its positions.
          make_padding: number of rows to arrays of padding alone.
          identity: what a position is counted in: flag -> its value, or a fingerprint of what it names. Not the batch
            size: the position is a row, from which batches of another size can go on.
          split: which order.
          shuffle_seed: seed of the order of "train".
          num_workers: threads that make batches ahead; 0: a batch is made when it is asked for.
          batch_size: rows in a batch of all processes together.
          process_index: this process, below process_count.
          process_count: processes that read the data.

        Raises:
          ValueError: batch_size is not a multiple of process_count.
        """
        if batch_size % process_count:
            raise ValueError(f"a batch of {batch_size} rows cannot be shared equally by {process_count} processes")
        self.num_rows = num_rows
        self._make_row = make_row
        self._make_padding = make_padding
        self._identity = dict(identity)
        self._split = split
        self._shuffle_seed = shuffle_seed
        self._num_workers = num_workers
        self._batch_size = batch_size
        self._part = (process_index, process_count)
        self._next_row = 0
        self._batches: Any = None  # grain's iterator, made when first needed

    def __iter__(self) -> "RowLoader":
        if self._split == "validation":
            self._seek(0)
        return self

    def __next__(self) -> Arrays:
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
            if "model.pictures_per_row" in identity:  # the flag's name before version 0.2
                identity["model.images_per_row"] = identity.pop("model.pictures_per_row")
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

    def _make_batches(self) -> Iterator[Arrays]:
        import grain

        rows = grain.MapDataset.source(range(self.num_rows))
        if self._split == "train":
            rows = rows.shuffle(seed=self._shuffle_seed).repeat()
        process_index, process_count = self._part
        source = _Batches(
            rows.map_with_index(lambda position, row: self._make_row(row, position)),
            self._make_padding,
            first_row=self._next_row,
            batch_size=self._batch_size,
            process_index=process_index,
            process_count=process_count,
        )
        # Threads, not processes: a batch is a few copies out of a memory map, cheaper than to hand between processes.
        num_threads = self._num_workers
        read_options = grain.ReadOptions(num_threads, prefetch_buffer_size=max(num_threads, _PREFETCH_BATCHES))
        return iter(grain.MapDataset.source(source).to_iter_dataset(read_options))


class _Batches:
    """One process's part of every batch, by number, from a first row on: a source of random access for grain.

    A batch is a function of its number alone, so its threads may work at several at once.
    """

    def __init__(
        self,
        rows: Any,
        make_padding: Callable[[int], Arrays],
        *,
        first_row: int,
        batch_size: int,
        process_index: int,
        process_count: int,
    ):
        self._rows = rows
        self._make_padding = make_padding
        self._batch_size = batch_size
        self._num_rows_here = batch_size // process_count
        self._first_row_here = first_row + process_index * self._num_rows_here
        self._num_batches = max(0, -(-(len(rows) - first_row) // batch_size))

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> Arrays:
        batch = self._make_padding(self._num_rows_here)
        first = self._first_row_here + index * self._batch_size
        for i, row in enumerate(range(first, min(first + self._num_rows_here, len(self._rows)))):
            for name, values in self._rows[row].items():
                batch[name][i] = values
        return batch
