"""Batches of images: held-out images, resuming, and the shares of processes."""

import dataclasses
import functools

import numpy as np
import pytest

from titan.core.config.validate import ConfigError
from titan.core.data.images.image_store import open_image_store
from titan.core.data.images.images_for_test import OneImageRows, TellingEncoders
from titan.core.data.images.loader import ImageLoader
from titan.core.data.images.source import ImageSource


def _loader(data, store, *, row_identity=(), **arguments):
    pack = functools.partial(OneImageRows, store)
    return ImageLoader(data, store, pack, row_identity=dict(row_identity), **arguments)


@pytest.fixture
def split(data):
    data = dataclasses.replace(data, validation_fraction=0.4)
    store = open_image_store(ImageSource(data), data, TellingEncoders())

    def make(split="train", **arguments):
        arguments = {"batch_size": 2, **arguments}
        return _loader(data, store, split=split, **arguments)

    return make


def _equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_each_image_is_on_one_side(split):
    train, validation = split(), split("validation")
    assert sorted([*train.images.numbers, *validation.images.numbers]) == list(range(6))
    assert len(validation.images.numbers) >= 1


def test_the_same_image_with_other_captions_is_on_the_same_side(data, tmp_path):
    for number in range(6):
        content = (tmp_path / f"files/p{number}.png").read_bytes()
        for copy in range(4):
            (tmp_path / f"files/p{number}-{copy}.png").write_bytes(content)
            (tmp_path / f"files/p{number}-{copy}.txt").write_text(f"caption {copy}")
    data = dataclasses.replace(data, validation_fraction=0.4)
    store = open_image_store(ImageSource(data), data, TellingEncoders())
    sides = [
        {tuple(store[number].latents[0]) for number in _loader(data, store, split=split, batch_size=2).images.numbers}
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


def test_a_position_of_other_images_is_refused(split, data):
    loader = split()
    other = dataclasses.replace(data, max_images=5)
    store = open_image_store(ImageSource(other), other, TellingEncoders())
    elsewhere = _loader(other, store, split="train", batch_size=2)
    with pytest.raises(ConfigError, match="--data.path: the saved data position was counted with"):
        elsewhere.set_state(loader.get_state())


def test_a_position_of_rows_that_are_made_in_another_way_is_refused(split):
    with pytest.raises(ConfigError, match="--model.images_per_row"):
        split(row_identity={"model.images_per_row": 2}).set_state(
            split(row_identity={"model.images_per_row": 1}).get_state()
        )


def test_captions_are_dropped_in_training_alone(data):
    data = dataclasses.replace(data, validation_fraction=0.4, caption_dropout=0.5)
    store = open_image_store(ImageSource(data), data, TellingEncoders())
    dropped = [_loader(data, store, split=split, batch_size=2).images.options for split in ("train", "validation")]
    assert [options["caption_dropout"] for options in dropped] == [0.5, 0.0]


def test_a_position_of_the_version_before_is_understood(split):
    identity = {"model.images_per_row": 2}
    loader = split(row_identity=identity)
    next(loader)
    saved = loader.get_state().replace(b"model.images_per_row", b"model.pictures_per_row")
    expected = next(loader)
    resumed = split(row_identity=identity)
    resumed.set_state(saved)
    assert _equal(next(resumed), expected)
