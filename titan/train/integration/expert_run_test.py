"""Runs with expert parallelism and the experts' bias: resumed bit for bit, by both executors, on other meshes."""

import pathlib
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file

from titan.train.step.state import EXPERT_BIAS
from titan.train.testing.runs import Workplace, differing, reported_losses, saved_state

RECIPE = "qwen3_moe_debug"
FLAGS = (
    "--model.num_layers=2",
    "--model.dim=64",
    "--model.num_heads=2",
    "--model.num_kv_heads=1",
    "--model.head_dim=32",
    "--model.num_experts=4",
    "--model.expert_ffn_dim=32",
    "--model.vocab_size=512",
    "--tokenizer.vocab_size=512",
    "--training.sequence_length=64",
    "--training.batch_size=4",
    "--training.validation_interval=4",
    "--training.steps=4",
    "--lr_schedule.kind=constant",
    "--lr_schedule.warmup_steps=2",
    "--checkpoint.interval=2",
    "--expert_balance.bias",
    "--expert_balance.auxiliary_loss=0.01",
    "--parallelism.expert_parallel=2",
)
FOUR_DEVICES = ("--parallelism.num_devices=4", "--tpu_config.use_scan_layers")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def uninterrupted(workplace) -> pathlib.Path:
    """A run on four devices, in loops, with checkpoints after 2 and 4 steps, and its exported weights."""
    ended = workplace.train(
        "uninterrupted", *FOUR_DEVICES, f"--checkpoint.save_hf={workplace.folder}/hf", defaults=FLAGS, recipe=RECIPE
    )
    steps = [line for line in ended.out if line.startswith("step 3 ")]
    assert len(steps) == 1 and all(
        label in steps[0] for label in (" aux_loss ", " load_max ", " entropy ", " dropped ")
    )
    return workplace.folder / "uninterrupted"


def _resume(workplace: Workplace, uninterrupted: pathlib.Path, name: str, *flags: str) -> pathlib.Path:
    folder = workplace.folder / name
    shutil.copytree(uninterrupted, folder, ignore=shutil.ignore_patterns("tensorboard", "summary.json", "4"))
    ended = workplace.train(name, *flags, defaults=FLAGS, recipe=RECIPE)
    assert f"resumed from {folder}/checkpoints/2" in ended.out
    return folder


def test_a_resumed_run_goes_on_bit_for_bit(workplace, uninterrupted):
    resumed = _resume(workplace, uninterrupted, "resumed", *FOUR_DEVICES)
    state = saved_state(uninterrupted, 4)
    assert differing(saved_state(resumed, 4), state) == []
    assert state[EXPERT_BIAS].shape == (2, 4) and np.abs(state[EXPERT_BIAS]).max() == pytest.approx(4e-3)


def test_the_torch_executor_goes_on_on_two_devices(workplace, uninterrupted):
    resumed = _resume(workplace, uninterrupted, "torch", "--parallelism.num_devices=2", "--tpu_config.executor=torch")
    got, expected = reported_losses(resumed), reported_losses(uninterrupted)
    assert sorted(got) == [3, 4]
    for step in got:  # sums over devices and within fusions in another order
        assert [*got[step]] == pytest.approx([*expected[step]], rel=1e-5)
    assert np.array_equal(saved_state(resumed, 4)[EXPERT_BIAS], saved_state(uninterrupted, 4)[EXPERT_BIAS])


def test_exported_weights_have_no_bias(workplace, uninterrupted):
    (path,) = (workplace.folder / "hf").glob("*.safetensors")
    names = load_file(path)
    assert len(names) == 3 + 2 * (8 + 1 + 3 * 4) and not [name for name in names if "bias" in name]
