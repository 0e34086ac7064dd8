"""Which documents are held out for validation."""

import numpy as np


def held_out(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Chooses about a fraction of the documents by their hashes alone.

    A document is on the same side wherever it stands in the corpus and on every host, and equal documents are on one
    side, so that no held-out document was trained on. Where there are two different documents, each side has at least
    one: the smallest hash is always held out, the largest never.

    Args:
      hashes: uint64 [num_documents].
      fraction: 0 holds out none.

    Returns:
      bool [num_documents], True for held-out documents.
    """
    if fraction == 0.0 or not len(hashes):
        return np.zeros(len(hashes), dtype=bool)
    smallest, largest = hashes.min(), hashes.max()
    if smallest == largest:
        return np.zeros(len(hashes), dtype=bool)
    # Python integers, since 2**64 * fraction is no uint64 when it rounds up.
    threshold = np.uint64(min(int(fraction * 2**64), 2**64 - 1))
    return ((hashes < threshold) | (hashes == smallest)) & (hashes != largest)
