"""Runs of several processes over gloo, as on several hosts: the numbers of one, checkpoints, stops, failures."""

import json
import pathlib
import shutil
import signal
import socket
import subprocess

import numpy as np
import pytest
import safetensors.numpy

from titan.train.step.state import PARAMS
from titan.train.testing.runs import (
    ENDLESS,
    TINY_FLAGS,
    Ended,
    Workplace,
    checkpoint_steps,
    reported_losses,
    saved_state,
    wait,
    wait_for_line,
)

FLAGS = (
    *TINY_FLAGS,
    "--model.num_layers=2",
    "--model.num_heads=4",
    "--model.num_kv_heads=4",
    "--parallelism.num_devices=4",
    # The devices of one process share this machine's cores; what is measured of them here means nothing.
    "--metrics.peak_tflops=1",
)
# Gloo and tensor parallelism sum in other orders than XLA does within a process, and training takes that further.
LATER_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="module")
def stopped(workplace) -> tuple[int, list[Ended]]:
    """The run "several" of two processes of which the second alone is told to stop: the step, and how they ended."""
    processes = _start_two(workplace, "several", ENDLESS)
    wait_for_line(processes[0], "step 1 ")
    processes[1].send_signal(signal.SIGTERM)
    ended = [wait(process) for process in processes]
    (step,) = checkpoint_steps(workplace.folder / "several")
    return step, ended


def test_a_signal_to_one_process_stops_all_after_the_same_step(stopped):
    step, (first, second) = stopped
    assert step > 1
    assert (first.code, second.code) == (128 + signal.SIGTERM,) * 2
    assert any(line.endswith(f"checkpoints/{step}") for line in first.out)
    # The first one reports, the other one is silent.
    assert _python_lines(second.out) == []
    assert first.err == ["SIGTERM to another process: stopping; a checkpoint is saved first"]
    assert second.err == []


def test_runs_of_one_process_and_several_are_the_same_run(workplace, stopped, tmp_path):
    """Two processes with FSDP, stopped; resumed by two with tensor parallelism and loops; by one; and one all the way.

    With tensor parallelism both processes hold parts of the same sequences, so that both read all rows.
    """
    step, _ = stopped
    validation = ("--training.validation_interval=2", "--training.validation_batches=1")
    exported = tmp_path / "exported"
    resumed = _train(
        workplace,
        f"--training.steps={step + 2}",
        "--distributed.local_processes=2",
        "--parallelism.tensor_parallel=4",
        "--tpu_config.use_scan_layers",
        f"--checkpoint.save_hf={exported}",
        *validation,
    )
    assert f"resumed from {workplace.folder}/several/checkpoints/{step}" in resumed.out
    _assert_exported(exported, saved_state(workplace.folder / "several", step + 2))

    _train(workplace, f"--training.steps={step + 4}", *validation)
    _train(
        workplace,
        f"--training.steps={step + 4}",
        f"--checkpoint.folder={workplace.folder}/one",
        "--checkpoint.interval=1000000",
        *validation,
    )
    found, expected = (reported_losses(workplace.folder / run) for run in ("several", "one"))
    assert sorted(found) == sorted(expected) == list(range(1, step + 5))
    for done, losses in expected.items():
        assert [*found[done]] == pytest.approx([*losses], rel=1e-6 if done < 4 else LATER_TOLERANCE)
    summaries = [json.loads((workplace.folder / run / "summary.json").read_text()) for run in ("several", "one")]
    assert summaries[0]["validation_loss"] == pytest.approx(summaries[1]["validation_loss"], rel=LATER_TOLERANCE)
    states = [saved_state(workplace.folder / run, step + 4) for run in ("several", "one")]
    assert states[0].keys() == states[1].keys()
    for name, array in states[1].items():
        np.testing.assert_allclose(states[0][name], array, rtol=1e-3, atol=1e-4, err_msg=name)


def test_the_death_of_one_process_ends_the_other_and_says_so(workplace, stopped):
    step, _ = stopped
    checkpoints = pathlib.Path("checkpoints", str(step))
    shutil.copytree(workplace.folder / "several" / checkpoints, workplace.folder / "killed" / checkpoints)
    processes = _start_two(workplace, "killed", ENDLESS, "--distributed.heartbeat_timeout_seconds=10")
    out = wait_for_line(processes[0], f"step {step + 1} ")
    assert f"resumed from {workplace.folder / 'killed' / checkpoints}" in out
    processes[1].kill()
    second, first = [wait(process) for process in reversed(processes)]
    assert second.code == -signal.SIGKILL
    # Gloo's collective fails, or it waits for ever and it is JAX that misses the heartbeat.
    assert (first.code, first.err[-1].partition(" (")[0]) == (
        1,
        "another process of this run has ended or cannot be reached",
    ) or (first.code == -signal.SIGABRT and any("indicates that another task died" in line for line in first.err))


def _start_two(workplace: Workplace, run: str, *flags: str) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = (f"--distributed.coordinator_address={address}", "--distributed.num_processes=2", *flags)
    return [workplace.start(run, *common, f"--distributed.process_id={index}", defaults=FLAGS) for index in range(2)]


def _train(workplace: Workplace, *flags: str) -> Ended:
    return workplace.train("several", *flags, defaults=FLAGS)


def _python_lines(lines: list[str]) -> list[str]:
    """Without those that gloo prints."""
    return [line for line in lines if not line.startswith("[Gloo]")]


def _assert_exported(folder: pathlib.Path, state: dict[str, np.ndarray]) -> None:
    """The weights of a folder are those of a checkpoint, bit for bit."""
    (path,) = folder.glob("*.safetensors")
    weights = safetensors.numpy.load_file(path)
    parameters = [array for name, array in state.items() if name.startswith(PARAMS)]
    # Of most of them it is enough that they are there: how names and layouts differ is held elsewhere.
    assert sorted(map(_sorted_bytes, weights.values())) == sorted(map(_sorted_bytes, parameters))
    for layer in range(2):
        wq = state[f"{PARAMS}layers.{layer}.attention.wq.weight"]
        assert np.array_equal(weights[f"model.layers.{layer}.self_attn.q_proj.weight"], wq)


def _sorted_bytes(array: np.ndarray) -> bytes:
    return np.sort(array, axis=None).tobytes()
