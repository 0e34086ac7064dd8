"""Packing: every token of every document once, with the labels, positions and segments that its place calls for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.core.data.packing import IGNORED_LABEL, PackedRows


def reference_rows(documents: list[list[int]], sequence_length: int) -> list[list[tuple[int, int, int, int]]]:
    """The rows token by token: (token, label, position, segment id)."""
    rows: list[list[tuple[int, int, int, int]]] = []
    row: list[tuple[int, int, int, int]] = []
    for document in documents:
        position, segment = 0, (row[-1][3] if row else 0) + 1
        for token, label in zip(document, [*document[1:], IGNORED_LABEL], strict=True):
            if len(row) == sequence_length:
                rows.append(row)
                row, position, segment = [], 0, 1
            row.append((token, label, position, segment))
            position += 1
        if len(row) == sequence_length:
            rows.append(row)
            row = []
    if row:
        rows.append(row + [(0, IGNORED_LABEL, 0, 0)] * (sequence_length - len(row)))
    return rows


@given(
    documents=st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=30), max_size=12),
    sequence_length=st.integers(1, 20),
    data=st.data(),
)
def test_rows_equal_packing_token_by_token(documents, sequence_length, data):
    chosen = data.draw(st.permutations(range(len(documents)))) if documents else []
    chosen = chosen[: data.draw(st.integers(0, len(chosen)))]
    tokens = np.array([token for document in documents for token in document], dtype=np.uint16)
    offsets = np.cumsum([0] + [len(document) for document in documents])
    rows = PackedRows(tokens, offsets, np.array(chosen, dtype=np.int64), sequence_length=sequence_length)

    expected = reference_rows([documents[i] for i in chosen], sequence_length)
    assert len(rows) == len(expected)
    assert rows.num_tokens == sum(len(documents[i]) for i in chosen)
    names = ("tokens", "labels", "positions", "segment_ids")
    for row, expected_row in zip((rows[i] for i in range(len(rows))), expected, strict=True):
        assert set(row) == set(names)
        assert all(row[name].dtype == np.int32 and row[name].shape == (sequence_length,) for name in names)
        assert list(zip(*(row[name].tolist() for name in names), strict=True)) == expected_row


def test_every_token_but_the_first_of_a_document_is_a_label_once():
    documents = [[5, 6, 7, 8, 9, 1], [2, 1], [3, 4, 1]]
    offsets = np.array([0, 6, 8, 11])
    rows = PackedRows(np.concatenate(documents), offsets, np.arange(3), sequence_length=4)
    labels = np.concatenate([rows[i]["labels"] for i in range(len(rows))])
    assert sorted(labels[labels != IGNORED_LABEL]) == sorted(token for document in documents for token in document[1:])


def test_a_row_outside_is_an_index_error():
    rows = PackedRows(np.arange(5), np.array([0, 5]), np.array([0]), sequence_length=4)
    for row in (-1, 2):
        with pytest.raises(IndexError, match=f"row {row} of 2"):
            rows[row]
