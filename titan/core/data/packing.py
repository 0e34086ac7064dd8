"""Documents laid end to end and cut into rows of one length, which a model takes in with segment ids and positions.

A row is a function of its number, read from the tokenised corpus by arithmetic on document lengths. grain's packing
transformations (first-fit, concat-then-split) are streams instead: their state is made of what one host has consumed,
so it differs between hosts, and going on from it replays elements. With rows by number, grain's global shuffle applies
to rows, the state of a run is one number that holds for any count of hosts, and no token is lost, repeated or padded
within an epoch except behind the last document.
"""

import numpy as np

IGNORED_LABEL = -100


class PackedRows:
    """The rows of an ordered choice of documents: a source of random access for grain.

    Each row is a dict of int32 arrays [sequence_length]:

    - tokens: ids; 0 as padding, which only the last row has.
    - labels: the document's next token, also where that begins the next row; IGNORED_LABEL at a document's last token,
      which is its end of text, and at padding. So each token but a document's first is predicted once.
    - positions: 0, 1, ... from where a document begins in the row.
    - segment_ids: 1, 2, ... for the documents in the row; 0 at padding.
    """

    def __init__(self, tokens: np.ndarray, offsets: np.ndarray, documents: np.ndarray, *, sequence_length: int):
        """Chooses documents.

        Args:
          tokens: ids of all documents, integers [num_tokens]; may be mapped from disk.
          offsets: document i is `tokens[offsets[i]:offsets[i + 1]]` and not empty; [num_documents + 1].
          documents: numbers of the chosen documents in their order, [num_chosen].
          sequence_length: tokens in a row.
        """
        self._tokens = tokens
        self._begins = offsets[documents]  # in `tokens`
        # Document i of the choice fills [ends[i - 1], ends[i]) of the rows laid end to end.
        self._ends = np.cumsum(offsets[documents + 1] - self._begins)
        self._sequence_length = sequence_length

    @property
    def num_tokens(self) -> int:
        """Tokens in all rows together, padding not counted."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def __len__(self) -> int:
        return -(-self.num_tokens // self._sequence_length)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        batch = empty_rows((self._sequence_length,))
        begin = row * self._sequence_length
        document = int(np.searchsorted(self._ends, begin, side="right"))
        filled = 0
        segment = 1
        while filled < self._sequence_length and document < len(self._ends):
            num_left = int(self._ends[document]) - begin - filled
            end_in_tokens = int(self._begins[document] + self._document_length(document))
            first = end_in_tokens - num_left
            length = min(num_left, self._sequence_length - filled)
            piece = slice(filled, filled + length)
            batch["tokens"][piece] = self._tokens[first : first + length]
            num_labels = min(length, num_left - 1)
            batch["labels"][filled : filled + num_labels] = self._tokens[first + 1 : first + 1 + num_labels]
            batch["positions"][piece] = np.arange(length)
            batch["segment_ids"][piece] = segment
            filled += length
            segment += 1
            document += 1
        return batch

    def _document_length(self, document: int) -> int:
        return int(self._ends[document] - (self._ends[document - 1] if document else 0))


def empty_rows(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Rows of padding alone: int32 arrays of the given shape."""
    fills = {"tokens": 0, "labels": IGNORED_LABEL, "positions": 0, "segment_ids": 0}
    return {name: np.full(shape, fill, dtype=np.int32) for name, fill in fills.items()}
