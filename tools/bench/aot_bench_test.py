"""What the benchmarks of ahead-of-time compilation make of reports, and of compilations that give none."""

import dataclasses
import json

import pytest

from titan.graph.aot.report import Compute, Memory, ModelledTime, Report
from tools.bench import aot_table, aot_vs_jax, compile_scaling
from tools.bench.aot_run import AotRun, aot_run
from tools.bench.published_mfu import PUBLISHED

_REPORT = Report(
    name="r", hardware="h", mesh="m", num_devices=2, num_chips=1, batch_size=8, sequence_length=128, collectives=(),
    compiler_options={},
    memory=Memory(
        capacity=4 * 2**30, needed=2**30, fits=True, parameters=1, optimizer_state=1, batch=1, at_peak={}, program=50,
        host=0, timeline={}, largest=(), advice=(),
    ),
    compute=Compute(model_flops=1.0, compiled_flops=2.0, hbm_bytes=3.0, kernels={}, stablehlo_bytes=600),
    modelled=ModelledTime(1.0, 1.0, 0.0, 0.0, 0.0, tokens_per_second_per_chip=5024.8, mfu=0.399, undeclared_kernels=()),
    seconds={"capture": 1.0, "spmd_check": 1.0, "passes": 1.0, "lower": 2.0, "compile": 5.0}, versions={}, missing=(),
)  # fmt: skip
_RUN = AotRun(_REPORT, "", cpu_seconds=20.0, peak_rss_bytes=3 * 10**9)
_FAILED = AotRun(None, "code 2: --hardware: no", cpu_seconds=1.0, peak_rss_bytes=10**9)


def test_rows_of_the_table_hold_the_model_against_what_is_published():
    rows = [
        aot_table.Row("llama3_405b", "tpu7x-4x4x8", _RUN),
        aot_table.Row("qwen3_235b_a22b", "tpu7x-4x4x4", _RUN),  # of which tokens alone are published
        aot_table.Row("llama3_8b", "v6e-2x4", _FAILED),
    ]
    assert [row.error for row in rows] == [pytest.approx(-0.3), pytest.approx(0.1), None]
    text = aot_table.to_markdown(rows).splitlines()
    assert text[2] == (
        "| llama3_405b | tpu7x-4x4x8 | 8 x 128 | yes | 1.0 | 4.0 | 3 | 2 | 5 | 3.0 | 39.9% | 5,025 | 57.0% | -30% |"
    )
    assert text[3].endswith("| 4,568 tokens/s/chip | +10% |")
    assert text[4] == "| llama3_8b | v6e-2x4 |  | code 2: --hardware: no |"
    numbers = aot_table.result(rows)
    assert (numbers["rows"], numbers["failed"], numbers["fitting"]) == (3, 1, 2)
    assert numbers["mean_abs_mfu_error"] == pytest.approx(0.2)
    assert numbers["llama3_405b@tpu7x-4x4x8_seconds"] == 10
    json.dumps(numbers, allow_nan=False)


def test_published_runs_have_a_speed():
    assert all(one.mfu or one.tokens_per_second_per_chip for one in PUBLISHED.values())


def test_depth_is_compared_where_both_ends_were_reached():
    deep = dataclasses.replace(
        _REPORT,
        memory=dataclasses.replace(_REPORT.memory, program=52),
        seconds={**_REPORT.seconds, "compile": 7.0},
    )
    shallow, deep = (compile_scaling.row_of(dataclasses.replace(_RUN, report=report)) for report in (_REPORT, deep))
    numbers = compile_scaling.result({"scan": {2: shallow, 126: deep}, "unrolled": {2: shallow}}, [2, 126])
    assert numbers["scan_126_over_2"] == 1.2
    assert numbers["program_126_over_2"] == 1.04
    assert not any(name.startswith("unrolled_") and "over" in name for name in numbers)
    assert numbers["unrolled_2_s"] == 10


def test_modes_are_those_that_the_configuration_has():
    assert compile_scaling.known_modes()[:2] == ["unrolled", "scan"]


def test_ratios_are_ours_over_jax_and_the_largest_counts():
    ours, jax_side = aot_vs_jax.Side(110, 3.0, 0.5, {"compile": 2.0}), aot_vs_jax.Side(100, 3.0, 1.0, {"compile": 1.0})
    numbers = aot_vs_jax.result({"a": (ours, jax_side), "b": (jax_side, ours)})
    assert (numbers["peak_bytes"], numbers["flops"], numbers["modelled_seconds"]) == (1.1, 1.0, 2.0)
    assert numbers["a_modelled_seconds"] == 0.5


def test_a_compilation_that_fails_or_takes_too_long_says_so():
    failed = aot_run("llama3_debug", ["--hardware=v6e-3x4"], timeout_seconds=60)
    assert failed.report is None
    assert failed.failure.startswith("code 2: --hardware: 'v6e-3x4': the chips of a v6e come in blocks of 2x2")
    assert aot_run("llama3_debug", [], timeout_seconds=0.05).failure == "ended after the limit of 0 s"
