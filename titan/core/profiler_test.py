import glob
import gzip
import json
import os

import jax
import jax.numpy as jnp
import pytest

from titan.core.config.validate import ConfigError
from titan.core.profiler import Profiler, ProfilerConfig


def _run(profiler: Profiler, steps) -> None:
    square = jax.jit(lambda x: x @ x)
    outputs = jnp.eye(64)
    with profiler:
        for step in steps:
            profiler.step(step, outputs)
            outputs = square(outputs)


def _traced_steps(folder) -> list[str]:
    (path,) = glob.glob(os.path.join(folder, "plugins", "profile", "*", "*.trace.json.gz"))
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return sorted({event["args"]["step_num"] for event in events if event.get("name") == "train"})


def test_traces_the_steps_of_the_window(tmp_path):
    profiler = Profiler(ProfilerConfig(enable=True, start_step=2, num_steps=2), str(tmp_path))
    _run(profiler, range(1, 8))
    assert profiler.folder == str(tmp_path / "profile")
    assert _traced_steps(profiler.folder) == ["2", "3"]


def test_a_run_that_ends_inside_the_window_writes_its_trace(tmp_path):
    config = ProfilerConfig(enable=True, start_step=2, num_steps=50, folder=str(tmp_path / "elsewhere"))
    _run(Profiler(config, str(tmp_path)), range(1, 4))
    assert _traced_steps(tmp_path / "elsewhere") == ["2", "3"]


def test_an_error_in_a_traced_step_is_not_hidden(tmp_path):
    with pytest.raises(KeyError, match="broken step"):
        with Profiler(ProfilerConfig(enable=True, start_step=1), str(tmp_path)) as profiler:
            profiler.step(1)
            raise KeyError("broken step")
    assert _traced_steps(tmp_path / "profile") == ["1"]


def test_off_writes_nothing(tmp_path):
    _run(Profiler(ProfilerConfig(), str(tmp_path)), range(1, 8))
    assert os.listdir(tmp_path) == []


def test_a_run_resumed_after_the_window_says_so_once(tmp_path, caplog):
    _run(Profiler(ProfilerConfig(enable=True), str(tmp_path)), range(100, 103))
    assert [record.getMessage() for record in caplog.records] == [
        "profiler: the run begins at step 100, after the window that ends before step 5: nothing is traced; "
        "raise --profiler.start_step"
    ]


def test_a_folder_that_cannot_be_written_is_refused():
    with pytest.raises(ConfigError, match="^--profiler.folder: "):
        ProfilerConfig(folder="/dev/null/profile").validate()
