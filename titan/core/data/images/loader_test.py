"""Batches of pictures: held-out pictures, resuming, and the shares of processes."""

import dataclasses

import numpy as np
import pytest

from titan.core.config.validate import ConfigError
from titan.core.data.images.image_store import open_picture_store
from titan.core.data.images.images_for_test import TellingEncoders, shapes
from titan.core.data.images.loader import PictureLoader
from titan.core.data.images.source import PictureSource


@pytest.fixture
def split(data):
    data = dataclasses.replace(data, validation_fraction=0.4)
    store = open_picture_store(PictureSource(data), data, TellingEncoders())

    def make(split="train", **arguments):
        arguments = {"batch_size": 2, **arguments}
        return PictureLoader(data, store, shapes(num_pictures=1, image_length=16), split=split, **arguments)

    return make


def _equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_each_picture_is_on_one_side(split):
    train, validation = split(), split("validation")
    assert sorted([*train.pictures.numbers, *validation.pictures.numbers]) == list(range(6))
    assert len(validation.pictures.numbers) >= 1


def test_the_same_picture_with_other_captions_is_on_the_same_side(data, tmp_path):
    for number in range(6):
        content = (tmp_path / f"files/p{number}.png").read_bytes()
        for copy in range(4):
            (tmp_path / f"files/p{number}-{copy}.png").write_bytes(content)
            (tmp_path / f"files/p{number}-{copy}.txt").write_text(f"caption {copy}")
    data = dataclasses.replace(data, validation_fraction=0.4)
    store = open_picture_store(PictureSource(data), data, TellingEncoders())
    sides = [
        {tuple(store[number].latents[0]) for number in PictureLoader(data, store, shapes(), split=split, batch_size=2)
         .pictures.numbers}
        for split in ("train", "validation")
    ]  # fmt: skip
    assert sides[0] and sides[1] and not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 6


def test_a_resumed_loader_goes_on_with_the_same_noise(split):
    loader = split()
    for _ in range(4):
        next(loader)
    state = loader.get_state()
    expected = [next(loader) for _ in range(3)]
    resumed = split(batch_size=2)
    resumed.set_state(state)
    assert all(_equal(next(resumed), batch) for batch in expected)


def test_two_processes_have_the_parts_of_the_batch_of_one(split):
    whole = next(split(batch_size=4))
    parts = [next(split(batch_size=4, process_index=index, process_count=2)) for index in range(2)]
    assert _equal(whole, {name: np.concatenate([part[name] for part in parts]) for name in whole})


def test_every_pass_of_validation_is_the_same_and_ends_with_padding(split):
    loader = split("validation", batch_size=4)
    first, second = list(loader), list(loader)
    assert all(_equal(a, b) for a, b in zip(first, second, strict=True))
    num_rows = sum(int((batch["image_segment_ids"].max(1) > 0).sum()) for batch in first)
    assert num_rows == loader.num_rows
    assert not first[-1]["latents"][-1].any()


def test_a_position_of_other_pictures_is_refused(split, data):
    loader = split()
    other = dataclasses.replace(data, max_pictures=5)
    store = open_picture_store(PictureSource(other), other, TellingEncoders())
    elsewhere = PictureLoader(other, store, shapes(num_pictures=1, image_length=16), split="train", batch_size=2)
    with pytest.raises(ConfigError, match="--data.path: the saved data position was counted with"):
        elsewhere.set_state(loader.get_state())
