"""Runs whose layers are split over devices: checkpoints onto other meshes and executors, Hugging Face weights."""

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file

from titan.train.testing.runs import TINY_FLAGS, Workplace, reported_losses

FLAGS = (*TINY_FLAGS, "--model.tie_embeddings")  # with one head of keys and values, which two devices share
SPLIT = "--parallelism.tensor_parallel=2"
# Losses of float32 training over three steps, whose sums are taken in other orders.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def alone(workplace) -> dict[int, set[float]]:
    """The losses of three steps on one device."""
    workplace.train("alone", "--training.steps=3", "--parallelism.num_devices=1", defaults=FLAGS)
    return reported_losses(workplace.folder / "alone")


@pytest.fixture(scope="module")
def split(workplace) -> pathlib.Path:
    """Two steps on two by two devices, with a checkpoint and exported weights."""
    export = f"--checkpoint.save_hf={workplace.folder}/hf"
    workplace.train("split", SPLIT, "--training.steps=2", "--parallelism.num_devices=4", export, defaults=FLAGS)
    return workplace.folder / "split"


def test_its_losses_are_those_of_one_device(split, alone):
    losses = reported_losses(split)
    assert sorted(losses) == [1, 2]
    for step, values in losses.items():
        assert [*values] == pytest.approx([*alone[step]], rel=TOLERANCE)


def test_the_torch_executor_goes_on_from_its_checkpoint_on_another_mesh(workplace, split, alone):
    folder = workplace.folder / "torch"
    shutil.copytree(split, folder, ignore=shutil.ignore_patterns("tensorboard", "summary.json"))
    flags = ("--training.steps=3", "--parallelism.num_devices=2", "--tpu_config.executor=torch")
    ended = workplace.train("torch", SPLIT, *flags, defaults=FLAGS)
    assert f"resumed from {folder}/checkpoints/2" in ended.out
    losses = reported_losses(folder)
    assert sorted(losses) == [3]
    assert [*losses[3]] == pytest.approx([*alone[3]], rel=TOLERANCE)


def test_weights_go_in_and_out_unchanged(workplace, split):
    first, second = workplace.folder / "hf", workplace.folder / "hf_again"
    weights = ("--optimizer.learning_rate=0", f"--checkpoint.load_hf={first}", f"--checkpoint.save_hf={second}")
    workplace.train("frozen", SPLIT, "--training.steps=2", "--parallelism.num_devices=2", *weights, defaults=FLAGS)
    files = set(json.loads((first / "model.safetensors.index.json").read_text())["weight_map"].values())
    for file in files:
        before, after = load_file(first / file), load_file(second / file)
        assert before and before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
