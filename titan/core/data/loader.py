"""Batches of packed rows of tokens for one host."""

from typing import Literal

import numpy as np

from titan.core.config.validate import ConfigError
from titan.core.data.config import DataConfig
from titan.core.data.corpus import Corpus
from titan.core.data.packing import PackedRows, empty_rows
from titan.core.data.row_loader import RowLoader
from titan.core.data.split import held_out
from titan.core.data.token_store import open_token_store
from titan.core.tokenizer import Tokenizer


class Loader(RowLoader):
    """Batches of one split of the corpus: dicts of int32 arrays [batch_size / process_count, sequence_length].

    What the arrays mean is said at `PackedRows`. "train" lays documents in an order drawn from `data.shuffle_seed`;
    "validation" is one pass over the held-out documents in the corpus's order.

    Attributes:
      num_documents: documents in the split.
      num_tokens: tokens in the split, with one end of text per document.
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
          sequence_length: tokens in a row.
          batch_size, process_index, process_count: see `RowLoader`.

        Raises:
          ConfigError: as `Corpus`, or the split has no document.
          ValueError: batch_size is not a multiple of process_count.
        """
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
        super().__init__(
            num_rows=len(rows),
            make_row=lambda row, position: rows[row],
            make_padding=lambda num_rows: empty_rows((num_rows, sequence_length)),
            identity={
                "data.path": corpus.fingerprint,
                "tokenizer.path": tokenizer.fingerprint,
                "data.validation_fraction": data.validation_fraction,
                "data.shuffle_seed": data.shuffle_seed,
                "training.sequence_length": sequence_length,
            },
            split=split,
            shuffle_seed=data.shuffle_seed,
            num_workers=data.num_workers,
            batch_size=batch_size,
            process_index=process_index,
            process_count=process_count,
        )
