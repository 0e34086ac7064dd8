"""The held-out documents: a stable choice of about the right size, never all and never none where that can be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.core.data.split import held_out


@given(
    hashes=st.lists(st.integers(0, 2**64 - 1), max_size=30).map(lambda values: np.array(values, dtype=np.uint64)),
    fraction=st.floats(0.0, 0.9),
)
def test_choice_depends_on_the_documents_alone(hashes, fraction):
    chosen = held_out(hashes, fraction)
    assert np.array_equal(held_out(hashes[::-1], fraction), chosen[::-1])
    assert not set(hashes[chosen]) & set(hashes[~chosen])
    if fraction > 0 and len(set(hashes.tolist())) > 1:
        assert 0 < chosen.sum() < len(hashes)
    else:
        assert not chosen.any()


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.9])
def test_size_is_about_the_fraction(fraction):
    hashes = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    assert abs(held_out(hashes, fraction).mean() - fraction) < 0.01
