"""A run on images, from flags to checkpoints: it resumes bit for bit, samples, and equals an eager run."""

import io
import json
import shutil

import numpy as np
import PIL.Image
import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from titan.train.testing.runs import Workplace, differing, reported_losses, saved_state

FLAGS = (
    "--data.path=",
    "--data.trial_images=photographs",
    "--model.images_per_row=2",
    "--data.resolution=64",
    "--data.max_images=10",
    "--model.num_double_blocks=1",
    "--model.num_single_blocks=1",
    "--model.dim=32",
    "--model.num_heads=2",
    "--model.rope_dims=4,6,6",
    "--model.text_length=24",
    "--training.sequence_length=80",
    "--training.batch_size=4",
    "--training.validation_interval=3",
    "--sampling.interval=3",
    "--sampling.num_images=3",
    "--sampling.num_steps=2",
    # The rate of a step does not depend on the length of the run.
    "--lr_schedule.kind=constant",
    "--lr_schedule.warmup_steps=2",
)
ONE_DEVICE = "--parallelism.num_devices=1"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return Workplace(tmp_path_factory.mktemp("runs"))


def _train(workplace, run, *flags):
    workplace.train(run, *FLAGS, *flags, defaults=(), recipe="flux_debug")
    return workplace.folder / run


@pytest.fixture(scope="module")
def whole(workplace):
    return _train(workplace, "whole", "--training.steps=6", "--checkpoint.interval=3", ONE_DEVICE)


def _sheets(folder):
    sheets = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("image"):
                    content = io.BytesIO(value.image.encoded_image_string)
                    sheets[event.step, value.tag] = np.asarray(PIL.Image.open(content))
    return sheets


def test_a_resumed_run_equals_one_that_was_not_stopped(workplace, whole):
    stopped = workplace.folder / "stopped"
    shutil.copytree(whole, stopped, ignore=shutil.ignore_patterns("tensorboard", "summary.json", "6"))
    resumed = _train(workplace, "stopped", "--training.steps=6", ONE_DEVICE)
    assert differing(saved_state(resumed, 6), saved_state(whole, 6)) == []
    losses = reported_losses(whole)
    assert reported_losses(resumed) == {step: losses[step] for step in (4, 5, 6)}
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (resumed, whole)]
    assert summaries[0]["validation_loss"] == summaries[1]["validation_loss"] > 0


def test_samples_are_in_tensorboard_and_change_with_the_weights(whole):
    sheets = _sheets(whole)
    assert list(sheets) == [(3, "samples"), (6, "samples")]
    first, second = sheets.values()
    assert first.shape == second.shape and first.std() > 10
    assert not np.array_equal(first, second)


def test_layers_and_rows_split_over_devices_make_the_same_steps_samples_and_checkpoint(workplace, whole):
    split = "--parallelism.tensor_parallel=2", "--parallelism.context_parallel=2", "--parallelism.num_devices=4"
    split = _train(workplace, "split", "--training.steps=6", *split, "--tpu_config.use_scan_layers")
    expected, got = reported_losses(whole), reported_losses(split)
    assert sorted(got) == [1, 2, 3, 4, 5, 6]
    for step, losses in got.items():
        assert [*losses] == pytest.approx([*expected[step]], rel=1e-5)  # float32, sums in another order
    for name, sheet in _sheets(whole).items():
        # An element of a sheet is rounded; a few may fall on the other side.
        assert np.abs(_sheets(split)[name].astype(int) - sheet).max() <= 1
    losses = [json.loads((folder / "summary.json").read_text())["validation_loss"] for folder in (split, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    state, expected_state = saved_state(split, 6), saved_state(whole, 6)
    assert {name: array.shape for name, array in state.items()} == {n: a.shape for n, a in expected_state.items()}
    for name, array in expected_state.items():
        if name.startswith("exp_avg/"):  # a mean of gradients; AdamW makes a step of any size of a gradient near zero
            assert np.abs(state[name] - array).max() <= 1e-4 * np.abs(array).max(), name


def test_two_processes_of_pytorch_make_the_same_steps_and_samples(workplace, whole):
    eager = "--tpu_config.use_graph_trainer=false", "--compile.enable=false", "--parallelism.num_devices=2"
    other = _train(workplace, "eager", "--training.steps=3", *eager)
    expected, got = reported_losses(whole), reported_losses(other)
    for step in (1, 2, 3):
        (a,), (b,) = got[step], expected[step]
        assert a == pytest.approx(b, rel=1e-5)  # float32, sums in another order
    # An element of a sheet is rounded; a few may fall on the other side.
    difference = np.abs(_sheets(other)[3, "samples"].astype(int) - _sheets(whole)[3, "samples"])
    assert difference.max() <= 1
