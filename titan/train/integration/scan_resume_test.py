"""Runs with layers as loops and runs without go on from one another's checkpoints and weights."""

import pathlib
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from titan.train.step.state import PARAMS
from titan.train.testing.runs import TINY_FLAGS, Workplace, reported_losses, saved_state

LAYERS = 2
FLAGS = (*TINY_FLAGS, f"--model.num_layers={LAYERS}", "--checkpoint.interval=2", "--parallelism.num_devices=2")
SCAN = "--tpu_config.use_scan_layers"
# Of losses after a few steps: float32 sums that XLA takes in another order in a loop's body.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def without(workplace) -> pathlib.Path:
    """A run without loops, with checkpoints after 2, 4 and 6 steps."""
    workplace.train("without", "--training.steps=6", defaults=FLAGS)
    return workplace.folder / "without"


def _go_on(workplace: Workplace, name: str, source: pathlib.Path, step: int, *flags: str) -> pathlib.Path:
    """A run that resumes at a step of another."""
    folder = workplace.folder / name
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("tensorboard", "summary.json"))
    for checkpoint in (folder / "checkpoints").iterdir():
        if checkpoint.name.isdecimal() and int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    ended = workplace.train(name, *flags, defaults=FLAGS)
    assert f"resumed from {folder}/checkpoints/{step}" in ended.out
    return folder


@pytest.fixture(scope="module")
def scanned(workplace, without) -> pathlib.Path:
    """Goes on with loops after two steps, to the fourth, and exports its weights."""
    export = f"--checkpoint.save_hf={workplace.folder}/hf"
    return _go_on(workplace, "scanned", without, 2, "--training.steps=4", SCAN, export)


def _assert_losses(folder: pathlib.Path, expected: pathlib.Path, steps: list[int]) -> None:
    got, theirs = reported_losses(folder), reported_losses(expected)
    assert sorted(got) == steps
    for step in steps:
        assert [*got[step]] == pytest.approx([*theirs[step]], rel=TOLERANCE)


def test_a_scanned_run_goes_on_from_a_checkpoint_without_loops(without, scanned):
    _assert_losses(scanned, without, [3, 4])
    got, expected = saved_state(scanned, 4), saved_state(without, 4)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        # Adam divides a small gradient by its own size: its last bits reach a parameter at the learning rate's scale.
        np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5 * np.abs(array).max(), err_msg=name)


def test_a_run_without_loops_goes_on_from_a_scanned_checkpoint(workplace, without, scanned):
    _assert_losses(_go_on(workplace, "after", scanned, 4, "--training.steps=6"), without, [5, 6])


def test_the_torch_executor_scans_and_goes_on_too(workplace, without):
    flags = (SCAN, "--tpu_config.executor=torch", "--compile.memory_policy=full", "--parallelism.num_devices=1")
    folder = _go_on(workplace, "torch", without, 2, "--training.steps=4", *flags)
    _assert_losses(folder, without, [3, 4])


def test_exported_weights_of_a_scanned_run_are_the_checkpoints_and_begin_another(workplace, scanned):
    (path,) = (workplace.folder / "hf").glob("*.safetensors")
    first, state = load_file(path), saved_state(scanned, 4)
    assert len(first) == sum(name.startswith(PARAMS) for name in state)
    for layer in range(LAYERS):
        wq = torch.from_numpy(state[f"{PARAMS}layers.{layer}.attention.wq.weight"])
        assert torch.equal(first[f"model.layers.{layer}.self_attn.q_proj.weight"], wq)
    flags = (f"--checkpoint.load_hf={path.parent}", f"--checkpoint.save_hf={workplace.folder}/again")
    frozen = ("--training.steps=2", "--optimizer.learning_rate=0")
    workplace.train("begun", *frozen, *flags, SCAN, defaults=FLAGS)
    second = load_file(workplace.folder / "again" / path.name)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
