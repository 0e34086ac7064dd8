"""Processes that are started together end together."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from titan.train.runtime import launch as launch_module
from titan.train.runtime.launch import launch


def _record(folder: pathlib.Path) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    path = folder / os.environ["RANK"]
    path.with_suffix(".partial").write_text(" ".join([str(os.getpid()), *(os.environ[name] for name in names)]))
    path.with_suffix(".partial").rename(path)


def _finish(folder: pathlib.Path) -> int:
    _record(folder)
    return 0


def _fail_as_rank_1(folder: pathlib.Path) -> int:
    _record(folder)
    if os.environ["RANK"] == "1":
        _records(folder, 2)  # the other has started
        return 3
    time.sleep(100)
    return 0


def _sleep(folder: pathlib.Path) -> int:
    _record(folder)
    time.sleep(100)
    return 0


def _records(folder: pathlib.Path, num_processes: int) -> list[list[str]]:
    """What the processes recorded, once all have."""
    paths = [folder / str(rank) for rank in range(num_processes)]
    deadline = time.monotonic() + 300
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [path.read_text().split() for path in paths]


def _is_running(pid: str) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_process_knows_its_place(tmp_path):
    assert launch(3, _finish, tmp_path) == 0
    records = _records(tmp_path, 3)
    assert [record[1:4] for record in records] == [[str(rank), "3", "127.0.0.1"] for rank in range(3)]
    assert len({record[4] for record in records}) == 1


def test_one_that_fails_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_module, "_SECONDS_AFTER_FAILURE", 0.2)
    assert launch(2, _fail_as_rank_1, tmp_path) == 3
    assert not any(_is_running(record[0]) for record in _records(tmp_path, 2))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on(tmp_path, number):
    def send() -> None:
        _records(tmp_path, 2)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    code = launch(2, _sleep, tmp_path)
    sender.join()
    # Python turns an interrupt that no one handles into an exception, which ends with code 1.
    assert code == (128 + number if number == signal.SIGTERM else 1)
    assert not any(_is_running(record[0]) for record in _records(tmp_path, 2))


def test_none_outlives_the_launcher(tmp_path):
    script = f"""
import pathlib
from titan.train.runtime.launch import launch
from titan.train.runtime.launch_test import _sleep
if __name__ == "__main__":
    launch(2, _sleep, pathlib.Path({str(tmp_path)!r}))
"""
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, str(tmp_path / "script.py")], env=environment) as process:
        pids = [record[0] for record in _records(tmp_path, 2)]
        assert all(map(_is_running, pids))
        process.kill()
    deadline = time.monotonic() + 120
    while any(map(_is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
