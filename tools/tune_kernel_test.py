"""The tuner ranks by the compiler's schedule and writes what kernels read; wrong flags are one line."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from titan.kernels import tile_table
from titan.kernels.grouped_matmul.tuning import tuning_cases
from tools import tune_kernel

# One short sequence, whose candidates compile in a second each.
_PROGRAM = """
import sys
from titan.kernels.splash_attention import tuning
tuning._SHAPES = ((512, 0),)
from tools import tune_kernel
sys.exit(tune_kernel.main(sys.argv[1:]))
"""


def test_the_best_blocks_by_the_compilers_schedule_become_the_table(tmp_path, monkeypatch):
    flags = ("--kernel=splash_attention", "--generation=v6e", "--shapes=forward", f"--output={tmp_path}")
    run = subprocess.run([sys.executable, "-c", _PROGRAM, *flags], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    costs = {sizes: float(cost) for sizes, cost in re.findall(r"^  (\{.*\}): ([\d.e+]+)$", run.stdout, re.M)}
    assert len(costs) >= 4
    assert len(set(costs.values())) > 1  # the schedule tells blocks apart
    monkeypatch.setenv(tile_table.FOLDER_VARIABLE, str(tmp_path))
    (path,) = tmp_path.iterdir()
    ((key, sizes),) = tile_table.read_table(path).items()
    assert "T512" in key
    assert costs[str(sizes)] == min(costs.values())
    assert tile_table.lookup("splash_attention", "v6e", key) == sizes


def test_ranking_is_by_cost_and_drops_what_does_not_fit():
    def cost(sizes):
        if sizes["block"] > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem")
        return 10.0 / sizes["block"]

    sizes = [{"block": block} for block in (1, 2, 3)]
    assert tune_kernel.ranked(sizes, cost) == [(5.0, {"block": 2}), (10.0, {"block": 1})]
    with pytest.raises(RuntimeError, match="no candidate compiles"):
        tune_kernel.ranked(sizes[2:], cost)


def test_where_there_is_the_device_a_call_is_timed():
    seen = []

    def function(x, sizes):
        jax.debug.callback(lambda *arrays: seen.append([array.tolist() for array in arrays]), x[0, :2], sizes)
        return x @ x

    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)]
    assert 0.0 < tune_kernel.timed_seconds(function, args, {1: (40, 24)}) < 10.0
    jax.effects_barrier()
    assert seen[0] == [[0.0, 0.0], [40, 24]]


def test_groups_that_are_timed_use_up_the_rows_and_split_tiles():
    for case in tuning_cases("v6e"):
        ((position, sizes),) = case.values.items()
        assert case.args[position].shape == (len(sizes),)
        assert sum(sizes) == case.args[0].shape[0]
        assert min(sizes) > 0
        assert all(sum(sizes[:end]) % 128 for end in (1, 3))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kernel=splash"], "--kernel: invalid choice: 'splash'"),
        (["--generation=v9"], "--generation: invalid choice: 'v9'"),
        (["--shapes=["], "--shapes: '\\[' is no regular expression"),
        ([], "--output: name a folder"),
    ],
)
def test_a_wrong_flag_is_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.delenv("BUILD_WORKSPACE_DIRECTORY", raising=False)
    given = {"--kernel": "--kernel=splash_attention", "--generation": "--generation=v6e"}
    given |= {flag.split("=")[0]: flag for flag in flags}
    with pytest.raises(SystemExit) as end:
        tune_kernel.main(list(given.values()))
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_shapes_that_match_nothing(tmp_path, capsys):
    before = os.environ.get("LIBTPU_INIT_ARGS")
    flags = ["--kernel=splash_attention", "--generation=v6e", "--shapes=T77", f"--output={tmp_path}"]
    try:
        assert tune_kernel.main(flags) == 2
    finally:
        os.environ.pop("LIBTPU_INIT_ARGS") if before is None else os.environ.update(LIBTPU_INIT_ARGS=before)
    assert "'T77' matches no shape of splash_attention" in capsys.readouterr().err
