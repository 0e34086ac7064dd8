"""Rows of packed images: what lies where, and what is drawn."""

import numpy as np
import pytest

from titan.core.data.images.image_store import open_image_store
from titan.core.data.images.images_for_test import TellingEncoders, shapes, six_images
from titan.core.data.images.source import ImageSource
from titan.models.flux.rows import PackedImages


@pytest.fixture
def store(tmp_path):
    data = six_images(tmp_path)
    return open_image_store(ImageSource(data), data, TellingEncoders())


def packed(store, *, dropout=0.0, seed=1, **sizes):
    numbers = np.arange(len(store))
    return PackedImages(store, numbers, shapes(**sizes), seed=seed, caption_dropout=dropout, guidance=3.5)


def test_every_image_is_in_one_row_with_its_caption_and_positions(store):
    images = packed(store)
    seen = []
    for number in range(len(images)):
        row = images.row(number, 0)
        ids, text_ids = row["image_segment_ids"], row["text_segment_ids"]
        assert set(ids) - {0} == set(text_ids) - {0} == set(range(1, ids.max() + 1))
        for segment in range(1, ids.max() + 1):
            tokens = row["text"][text_ids == segment]
            caption = bytes(tokens[:, 0].astype(np.uint8)).rstrip(b"\0").decode()
            image = int(caption.removeprefix("caption "))
            seen.append(image)
            here = ids == segment
            np.testing.assert_allclose(row["latents"][here], 40 * image / 255, rtol=2**-11)
            rows, columns = store.grids[image]
            expected = [[0, r, c] for r in range(rows) for c in range(columns)]
            assert row["image_positions"][here].tolist() == expected
            assert len(set(row["timestep"][here])) == 1
            assert row["pooled"][segment - 1].tolist() == [9, 9]
        for name in ("latents", "timestep", "image_positions"):
            assert not row[name][ids == 0].any()
        assert not row["text"][text_ids == 0].any()
        assert row["guidance"].tolist() == [3.5, 3.5]
    assert sorted(seen) == list(range(6))
    assert len(images) < 6


def test_one_image_a_row(store):
    assert len(packed(store, num_images=1)) == 6


def test_noise_and_times_are_drawn_anew_at_each_position_and_alike_at_the_same(store):
    row, again, later = (packed(store).row(0, position) for position in (5, 5, 2**40))
    for name, array in row.items():
        assert np.array_equal(array, again[name]), name
        assert array.dtype == again[name].dtype
    for name in ("noise", "timestep"):
        assert not np.array_equal(row[name], later[name])
    assert not np.array_equal(row["noise"], packed(store, seed=2).row(0, 5)["noise"])
    many = np.concatenate([packed(store).row(0, position)["noise"].ravel() for position in range(200)])
    # 25,600 draws: five standard errors.
    assert abs(many.mean()) < 5 / len(many) ** 0.5
    assert abs(many.std() - 1) < 5 / (2 * len(many)) ** 0.5
    times = [packed(store).row(0, position)["timestep"][0] for position in range(200)]
    assert 0 <= min(times) < 0.1 and 0.9 < max(times) < 1


def test_the_share_of_dropped_captions_is_that_asked_for(store):
    images = packed(store, dropout=0.25)
    dropped = [images.row(0, position)["pooled"][0, 0] == 0 for position in range(400)]
    assert abs(np.mean(dropped) - 0.25) < 5 * (0.25 * 0.75 / 400) ** 0.5
    row = images.row(0, dropped.index(True))
    assert row["text"][row["text_segment_ids"] == 1].tolist() == [[0, 0, 0]]
    assert row["image_segment_ids"].any()
