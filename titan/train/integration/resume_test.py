"""A run that is stopped and resumed goes on as if it had never stopped: on the same mesh bit for bit."""

import json
import pathlib
import re
import shutil
import signal

import pytest

from titan.core.config.serialize import from_json
from titan.train.config.run import Config
from titan.train.inputs.data import open_data
from titan.train.testing.grid import grid
from titan.train.testing.runs import (
    ENDLESS,
    Workplace,
    checkpoint_steps,
    differing,
    reported_losses,
    saved_state,
    wait,
    wait_for_line,
)

STEPS_AFTER = 15
EAGER_PROCESSES = (
    "--tpu_config.use_graph_trainer=false",
    "--compile.enable=false",
    "--parallelism.num_devices=2",
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def stopped(workplace) -> pathlib.Path:
    """A run on two devices that SIGTERM stopped between two of its regular checkpoints, or at one."""
    process = workplace.start("stopped", ENDLESS, "--checkpoint.interval=4", "--checkpoint.keep=2")
    wait_for_line(process, "step 15 ")
    process.send_signal(signal.SIGTERM)
    ended = wait(process)
    assert ended.code == 128 + signal.SIGTERM
    assert [line for line in ended.err if "SIGTERM" in line] == [
        "SIGTERM: stopping after this step; a checkpoint is saved first"
    ]
    return workplace.folder / "stopped"


@pytest.fixture(scope="module")
def last_step(stopped) -> int:
    return checkpoint_steps(stopped)[-1] + STEPS_AFTER


@pytest.fixture(scope="module")
def uninterrupted(workplace, last_step) -> pathlib.Path:
    workplace.train("uninterrupted", f"--training.steps={last_step}", "--checkpoint.interval=1000000")
    return workplace.folder / "uninterrupted"


def _resume(workplace, stopped, name, last_step, *flags) -> pathlib.Path:
    folder = workplace.folder / name
    shutil.copytree(stopped, folder)
    stopped_at = checkpoint_steps(stopped)[-1]
    ended = workplace.train(name, f"--training.steps={last_step}", "--checkpoint.interval=1000000", *flags)
    assert f"resumed from {folder}/checkpoints/{stopped_at}" in ended.out
    assert [line.split()[1] for line in ended.out if line.startswith("step ")] == [
        str(step) for step in range(stopped_at + 1, last_step + 1)
    ]
    return folder


def test_a_stop_saves_the_step_reached_and_marks_the_summary(stopped):
    step = checkpoint_steps(stopped)[-1]
    assert step >= 15
    assert len(checkpoint_steps(stopped)) == 2
    assert sorted(reported_losses(stopped)) == list(range(1, step + 1))
    summary = json.loads((stopped / "summary.json").read_text())
    assert summary["stop_signal"] == signal.SIGTERM
    assert summary["steps"] == step
    assert summary["checkpoint"] == f"{stopped}/checkpoints/{step}"


def test_the_same_mesh_goes_on_bit_for_bit(workplace, stopped, uninterrupted, last_step):
    folder = _resume(workplace, stopped, "same_mesh", last_step)
    expected = reported_losses(uninterrupted)
    assert sorted(expected) == list(range(1, last_step + 1))
    assert reported_losses(folder) == expected
    assert all(len(losses) == 1 for losses in expected.values())
    assert differing(saved_state(folder, last_step), saved_state(uninterrupted, last_step)) == []
    summaries = [json.loads((run / "summary.json").read_text()) for run in (folder, uninterrupted)]
    for field in ("first_loss", "last_loss", "best_loss", "steps", "skipped_steps", "stop_signal"):
        assert summaries[0][field] == summaries[1][field]


def test_both_halves_of_the_run_cross_an_epoch(stopped):
    config = from_json((stopped / "config.json").read_text(), Config)
    num_rows = open_data(config, process_index=0, process_count=1).train.num_rows
    assert num_rows % config.training.batch_size  # an epoch ends within a batch
    assert num_rows < 15 * config.training.batch_size
    assert num_rows < STEPS_AFTER * config.training.batch_size


@pytest.mark.parametrize(
    "flags",
    grid(
        {
            "hsdp_2x2": ("--parallelism.num_devices=4", "--parallelism.data_parallel_replicate=2"),
            "one_device": ("--parallelism.num_devices=1",),
            "eager_processes": EAGER_PROCESSES,
        },
        {"hsdp_2x2", "one_device"},
    ),
)
def test_another_mesh_or_executor_goes_on_within_rounding(workplace, stopped, uninterrupted, last_step, flags, request):
    folder = _resume(workplace, stopped, request.node.callspec.id, last_step, *flags)
    expected, got = reported_losses(uninterrupted), reported_losses(folder)
    assert sorted(got) == list(range(1, last_step + 1))
    for step in got:
        assert [*got[step]] == pytest.approx([*expected[step]], rel=1e-5)


@pytest.mark.parametrize("flags", grid({"xla": (), "eager_processes": EAGER_PROCESSES}, {"eager_processes"}))
def test_sigint_stops_too_and_no_second_run_disturbs_the_first(workplace, flags, request):
    name = f"interrupted_{request.node.callspec.id}"
    process = workplace.start(name, ENDLESS, *flags)
    wait_for_line(process, "step 3 ")
    if not flags:
        second = workplace.run(name, ENDLESS)
        assert (second.code, len(second.err)) == (2, 1)
        assert re.match(r"--checkpoint\.folder: process \d+ is training in .*; wait for it", second.err[0])
    process.send_signal(signal.SIGINT)
    ended = wait(process)
    assert ended.code == 128 + signal.SIGINT
    assert ended.err == ["SIGINT: stopping after this step; a checkpoint is saved first"]
    folder = workplace.folder / name
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["stop_signal"], summary["steps"]) == (signal.SIGINT, checkpoint_steps(folder)[-1])


def _damage(checkpoint: pathlib.Path, how: str) -> None:
    """Damages every file that holds array data."""
    paths = [path for path in (checkpoint / "arrays").rglob("d/*") if path.is_file()]
    assert paths
    for path in paths:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        if how == "deleted":
            path.unlink()
        else:
            path.write_bytes(data[: len(data) // 2] if how == "truncated" else data)


# Of each kind of damage that it is noticed, checkpoint_test holds.
@pytest.mark.parametrize(
    "how", grid({how: how for how in ("truncated", "flipped", "deleted")}, {"truncated", "deleted"})
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(workplace, stopped, uninterrupted, last_step, how):
    folder = workplace.folder / how
    shutil.copytree(stopped, folder)
    before, damaged = checkpoint_steps(folder)
    _damage(folder / "checkpoints" / str(damaged), how)
    ended = workplace.run(how, f"--training.steps={last_step}", "--checkpoint.interval=1000000")
    assert ended.code == 0
    assert f"resumed from {folder}/checkpoints/{before}" in ended.out
    named = [line for line in ended.err if line.startswith(f"checkpoint {folder}/checkpoints/{damaged} is damaged")]
    assert len(named) == 1
    assert len(ended.err) == 2  # and that it is set aside
    assert "set_aside" in ended.err[1]
    assert reported_losses(folder) == reported_losses(uninterrupted)
    assert differing(saved_state(folder, last_step), saved_state(uninterrupted, last_step)) == []


def test_no_intact_checkpoint_ends_the_run_with_one_line(workplace, stopped):
    folder = workplace.folder / "all_damaged"
    shutil.copytree(stopped, folder)
    for step in checkpoint_steps(folder):
        _damage(folder / "checkpoints" / str(step), "deleted")
    files = _files(folder)
    ended = workplace.run("all_damaged", ENDLESS)
    assert ended.code == 1
    assert [line for line in ended.err if "is damaged and not used" not in line] == [
        f"none of the 2 checkpoints in {folder}/checkpoints is intact; restore the folder from a copy, or begin anew "
        "with --checkpoint.resume=false or another --checkpoint.folder"
    ]
    assert len(ended.err) == 3
    assert _files(folder) == files  # nothing is thrown away


def test_another_model_is_refused_and_changes_nothing(workplace, stopped):
    files = _files(stopped)
    compiled = workplace.compiled
    ended = workplace.run("stopped", ENDLESS, "--model.dim=32")
    assert ended.code == 2
    assert len(ended.err) == 1
    assert ended.err[0].startswith(f"--checkpoint.folder: checkpoint {stopped}/checkpoints/")
    assert "as float32[512, 64], this run as float32[512, 32]; run with the configuration" in ended.err[0]
    assert workplace.compiled == compiled
    assert _files(stopped) == files


def _files(folder: pathlib.Path) -> dict[str, int]:
    """Path to time of change; of all files but the lock."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
