"""A run that is killed again and again ends with the losses and the state of one that never was."""

import pathlib
import random
import signal
import time

import pytest

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

# When the run is killed: while it restores, captures and makes its first steps; while it trains and saves; in a save.
KILLS = {
    "a_few": ("training", "save", "start", "save"),
    "many": ("start", "training", "save") * 4,
}
# A checkpoint every step, so that a save is in progress nearly all the time.
FLAGS = ("--checkpoint.interval=1", "--checkpoint.keep=2")


@pytest.mark.parametrize("kills", grid(KILLS, {"many"}))
def test_kill_at_any_moment_loses_only_steps_after_the_last_checkpoint(tmp_path, kills):
    workplace = Workplace(tmp_path)
    folder = tmp_path / "killed"
    chance = random.Random(4)
    newest = num_in_save = 0
    for moment in kills:
        process = workplace.start("killed", ENDLESS, *FLAGS)
        out = []
        # After three steps the checkpoint of the first is finished.
        for line in ["llama3_debug: "] if moment == "start" else ["step "] * 3:
            out += wait_for_line(process, line)
        time.sleep(chance.uniform(0, 3 if moment == "start" else 1))
        if moment == "save":
            _wait_for_a_save(folder)
            time.sleep(chance.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        ended = wait(process)
        assert ended.code == -signal.SIGKILL
        assert ended.err == []
        out += ended.out
        _assert_resumed_from(newest, out, folder)
        newest = _newest(folder, newest)
        reported = [int(line.split()[1]) for line in out if line.startswith("step ")]
        # Step n is reported when the checkpoint of step n - 1 may be in progress still, and that of n - 2 is finished.
        assert newest >= max(reported, default=0) - 2
        num_in_save += bool(_unfinished(folder))
    assert num_in_save >= 1
    assert newest >= len(kills) - kills.count("start")

    last_step = newest + 5
    ended = workplace.train("killed", f"--training.steps={last_step}", *FLAGS)
    _assert_resumed_from(newest, ended.out, folder)
    assert checkpoint_steps(folder) == [last_step - 1, last_step]
    assert _unfinished(folder) == []

    workplace.train("uninterrupted", f"--training.steps={last_step}", "--checkpoint.interval=1000000")
    expected = reported_losses(tmp_path / "uninterrupted")
    assert sorted(expected) == list(range(1, last_step + 1))
    # Steps done twice count twice here: each must have come out the same. None is missing from the curve.
    assert reported_losses(folder) == expected
    assert differing(saved_state(folder, last_step), saved_state(tmp_path / "uninterrupted", last_step)) == []


def _assert_resumed_from(step: int, out: list[str], folder: pathlib.Path) -> None:
    """If the process came so far, it went on from the newest checkpoint that was finished when it started."""
    resumed = [line for line in out if line.startswith("resumed from ")]
    reported = [int(line.split()[1]) for line in out if line.startswith("step ")]
    if reported or resumed:
        assert resumed == ([f"resumed from {folder}/checkpoints/{step}"] if step else [])
    if reported:
        assert reported == list(range(step + 1, reported[-1] + 1))


def _unfinished(folder: pathlib.Path) -> list[str]:
    """Checkpoints being written, or left by a kill."""
    return [path.name for path in (folder / "checkpoints").glob("*") if not path.name.isdecimal()]


def _wait_for_a_save(folder: pathlib.Path) -> None:
    """Waits until a save begins."""
    deadline = time.monotonic() + 300
    for is_saving in (False, True):
        while bool(_unfinished(folder)) != is_saving:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def _newest(folder: pathlib.Path, before: int) -> int:
    """The newest finished checkpoint, which is never older than the one before the start."""
    newest = max(checkpoint_steps(folder), default=0)
    assert newest >= before
    return newest
