"""Progress: what is shown on a terminal and elsewhere, and when."""

import io
import os
import pty
import re
import time

import pytest

from titan.core.progress import duration, progress, quiet


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (125, "2 min 5 s"),
        (3599.6, "1 h"),
        (12_000, "3 h 20 min"),
        (7_199, "2 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_quick_work_leaves_no_line():
    stream = io.StringIO()
    with progress("compiling", stream=stream):
        pass
    assert stream.getvalue() == ""


def test_long_work_has_a_line_each_interval_and_one_at_its_end(monkeypatch):
    monkeypatch.setenv("TITAN_PROGRESS_SECONDS", "0.05")
    stream = io.StringIO()
    with progress("reading files", total=8, stream=stream) as work:
        work.advance(3)
        while stream.getvalue().count("\n") < 2:
            time.sleep(0.01)
        work.advance(5)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "reading files: 3 of 8, 0 s so far"
    assert lines[-1] == "reading files: 8 of 8, 0 s, done"


def test_an_error_ends_it_and_passes_through(monkeypatch):
    monkeypatch.setenv("TITAN_PROGRESS_SECONDS", "0.01")
    stream = io.StringIO()
    with pytest.raises(ValueError, match="no"), progress("compiling", stream=stream):
        raise ValueError("no")
    written = stream.getvalue()
    time.sleep(0.05)
    assert stream.getvalue() == written
    assert "done" not in written


def test_it_can_be_off(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setenv("TITAN_PROGRESS_SECONDS", "0.01")
    with quiet(), progress("compiling", stream=stream):
        time.sleep(0.05)
    monkeypatch.setenv("TITAN_PROGRESS_SECONDS", "0")
    with progress("compiling", stream=stream):
        time.sleep(0.05)
    assert stream.getvalue() == ""


def test_a_terminal_shows_the_work_while_it_goes_on_and_nothing_after_it():
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        with progress("compiling train_step", stream=stream):
            time.sleep(0.7)
        stream.flush()
        shown = os.read(master, 65536).decode()
    assert re.search(r"compiling train_step, \d s", shown)
    assert shown.endswith("\x1b[2K") or "\x1b[?25h" in shown  # the line is erased, the cursor back
    os.close(master)
