"""The main program as its users meet it: mistakes in one line, and what a run leaves behind."""

import json
import pathlib
import re
from unittest.mock import Mock

import pytest

from titan.core.config.tree import leaves
from titan.core.config.validate import ConfigError, LocalConfigError
from titan.graph.passes.options import PassOptions
from titan.graph.passes.registry import passes_for
from titan.train import main
from titan.train.config.compile import TpuConfig
from titan.train.config.run import Config
from titan.train.testing.runs import Workplace, checkpoint_steps, reported_losses

STEPS = ("--training.steps=6", "--checkpoint.interval=4")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def dumped(workplace) -> pathlib.Path:
    """The folder of graphs that the run `first` wrote."""
    dump = workplace.folder / "dump"
    workplace.train("first", *STEPS, "--training.validation_interval=3", f"--tpu_config.dump_graph={dump}")
    return dump


@pytest.fixture(scope="module")
def first(workplace, dumped) -> pathlib.Path:
    return workplace.folder / "first"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--training.step=4"], "--training.step: there is no such flag; did you mean --training.steps? "),
        (["--training.steps=many"], "--training.steps: 'many' is not admitted; give an integer of at least 1"),
        (["--data.path=/no/where"], "--data.path: there is no file or folder '/no/where'; correct the path"),
        (["--tokenizer.path=/no/where"], "--tokenizer.path: there is no file or folder '/no/where'; correct the path"),
        (
            ["--parallelism.num_devices=3", "--training.batch_size=16"],
            "--training.batch_size: 16 is not a multiple of 3 devices times 1 microbatches; give a multiple of 3, e.g.",
        ),
        (
            ["--parallelism.num_devices=4", "--parallelism.data_parallel_replicate=3"],
            "--parallelism.data_parallel_replicate: 3 does not divide 4 devices; give a divisor of 4",
        ),
        (
            ["--tpu_config.disable_passes=dead_code,speed"],
            "--tpu_config.disable_passes: ('dead_code', 'speed') is not admitted; give a comma-separated list out of "
            "no_ops, common_subexpressions, dead_code",
        ),
        (
            ["--config_file=/no/where.json"],
            "--config_file: '/no/where.json' cannot be read (No such file or directory)",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_in_the_flags_is_one_line_before_anything_else(tmp_path, flags, line):
    workplace = Workplace(tmp_path)
    ended = workplace.run("run", *flags)
    assert (ended.code, ended.out, len(ended.err)) == (2, [], 1)
    assert ended.err[0].startswith(line)
    assert sorted(path.name for path in tmp_path.iterdir()) == [workplace.corpus.name]


@pytest.mark.parametrize("case", ["too_many_ids", "no_tokenizer", "no_text", "too_many_devices"])
def test_a_mistake_found_in_files_or_devices_is_one_line_before_anything_is_compiled(tmp_path, first, case):
    tokenizer = next((first.parent / ".cache" / "titan" / "tokenizers").glob("*.json"))
    (tmp_path / "bad.json").write_text("{}")
    flags, line = {
        "too_many_ids": (
            [f"--tokenizer.path={tokenizer}", "--model.vocab_size=300"],
            r"--model\.vocab_size: 300 is less than the tokenizer's \d+ token ids; give at least \d+, or another "
            r"--tokenizer\.path",
        ),
        "no_tokenizer": (
            [f"--tokenizer.path={tmp_path}/bad.json"],
            r"--tokenizer\.path: .*bad\.json: not a tokenizers file",
        ),
        "no_text": (["--data.text_field=body"], r"--data\.text_field: .*corpus\.jsonl:1: .*; "),
        "too_many_devices": (
            ["--parallelism.data_parallel_shard=4"],
            r"--parallelism\.data_parallel_shard: 4 times data_parallel_replicate=1 is 4, not 2 devices; give 2, or "
            r"--parallelism\.num_devices=4",
        ),
    }[case]
    workplace = Workplace(tmp_path)
    ended = workplace.run("run", *flags)
    assert (ended.code, ended.out, len(ended.err)) == (2, [], 1)
    assert re.match(line, ended.err[0])
    assert workplace.compiled == []
    assert not (tmp_path / "run").exists()


def test_of_several_processes_one_says_what_all_would_and_each_what_it_alone_knows(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    of_all, of_one = ConfigError("data.path", "is missing", "x"), LocalConfigError("data.path", "p.png is broken", "x")
    monkeypatch.setattr(main, "_train", Mock(side_effect=[of_all, of_one, of_all]))
    config = Config(tpu_config=TpuConfig(executor="torch"))
    assert main._run(config) == 2
    with pytest.raises(LocalConfigError, match="p.png is broken"):
        main._run(config)
    # A run of the xla executor is one process, whatever a scheduler calls it, unless it is asked to be several.
    with pytest.raises(ConfigError, match="is missing"):
        main._run(Config())


def test_every_stage_of_both_graphs_is_written(dumped):
    names = ("captured", "no_ops", "common_subexpressions", "dead_code", "memory_policy", "cross_entropy_backward")
    stages = [f"{number:02d}_{name}.txt" for number, name in enumerate(names)]
    for step in ("train_step", "eval_step"):
        assert sorted(path.name for path in (dumped / step).iterdir()) == stages
    text = (dumped / "train_step" / stages[-1]).read_text()
    # 256 of the 512 rows of the table are this rank's; an op has its shape, its region, its module, its line.
    assert text.startswith("%arg0_1: float32[256, 64] = input params/embedding.weight\n")
    for region in ("forward", "loss", "backward", "optimizer"):
        assert re.search(rf"^%\w+: float32\[.*\] = aten\.\w+\.\w+\(.*\)  # {region}\b", text, re.MULTILINE), region
    assert re.search(r"_c10d_functional\.reduce_scatter_tensor.*dp_shard", text)
    assert re.search(r"# forward layers\.0\.feed_forward\.w1 .*\.py:\d+ save$", text, re.MULTILINE)
    # The last two replace one op by several.
    num_lines = [len((dumped / "train_step" / stage).read_text().splitlines()) for stage in stages[:-2]]
    assert num_lines == sorted(num_lines, reverse=True)
    assert num_lines[-1] < num_lines[0]


def test_disabled_passes_are_left_out(workplace, first):
    dump = workplace.folder / "fewer_passes"
    flags = "--tpu_config.disable_passes=no_ops,common_subexpressions", f"--tpu_config.dump_graph={dump}"
    workplace.train("fewer_passes_run", *STEPS, *flags)
    assert sorted(path.name for path in (dump / "train_step").iterdir()) == [
        "00_captured.txt",
        "03_dead_code.txt",
        "04_memory_policy.txt",
        "05_cross_entropy_backward.txt",
    ]
    expected, got = reported_losses(first), reported_losses(workplace.folder / "fewer_passes_run")
    assert {step: pytest.approx([*losses], rel=1e-5) for step, losses in expected.items()} == {
        step: [*losses] for step, losses in got.items()
    }


def test_the_passes_are_those_that_the_flag_names():
    (leaf,) = [leaf for leaf in leaves(Config()) if leaf.path == "tpu_config.disable_passes"]
    assert leaf.choices == tuple(step.__name__ for step in passes_for("xla", PassOptions()))


def test_the_summary_says_what_the_run_came_to(first):
    summary = json.loads((first / "summary.json").read_text())
    losses = [*reported_losses(first).values()]
    assert len(losses) == 6
    assert summary["name"] == "llama3_debug"
    assert (summary["first_loss"], summary["last_loss"]) == (*losses[0], *losses[-1])
    assert summary["best_loss"] == min(loss for reported in losses for loss in reported)
    assert (summary["steps"], summary["skipped_steps"], summary["recompiles"]) == (6, 0, 0)
    assert summary["stop_signal"] is None
    assert summary["tokens_per_second"] == pytest.approx(4 * 64 / summary["median_step_seconds"])
    assert 0 < summary["mfu"]
    assert 0 < summary["validation_loss"] < 7
    assert all(summary[f"{stage}_seconds"] > 0 for stage in ("capture", "lower", "compile"))
    assert summary["folder"] == str(first)
    for name, path in {"checkpoint": "checkpoints/6", "config": "config.json", "metrics": "tensorboard"}.items():
        assert summary[name] == str(first / path)
        assert (first / path).exists()


def test_the_configuration_lies_beside_the_checkpoints_and_repeats_the_run(workplace, first, dumped):
    assert re.search(r"^  num_devices: 2$", (first / "config.txt").read_text(), re.MULTILINE)  # the default 0, resolved
    compiled = workplace.compiled
    ended = workplace.train("second", f"--config_file={first}/config.json", defaults=())
    second = workplace.folder / "second"
    assert ended.out[-4:] == [
        f"checkpoint: {second}/checkpoints/6",
        f"metrics: {second}/tensorboard",
        f"config: {second}/config.json",
        f"summary: {second}/summary.json",
    ]
    assert reported_losses(second) == reported_losses(first)
    assert json.loads((second / "config.json").read_text()) == json.loads(
        (first / "config.json").read_text().replace(f'"{first}"', f'"{second}"')
    )
    assert workplace.compiled == compiled  # a second start compiles nothing


def test_a_finished_run_says_so_and_goes_on_when_asked(workplace, first):
    ended = workplace.train("second", *STEPS)
    folder = workplace.folder / "second"
    assert "all of --training.steps=6 are done; give more to train on" in ended.out
    assert checkpoint_steps(folder) == [4, 6]
    workplace.train("second", "--training.steps=7")
    assert checkpoint_steps(folder) == [4, 6, 7]


def test_updates_that_are_not_finite_are_reported(workplace):
    ended = workplace.run("diverged", *STEPS, "--optimizer.learning_rate=1e38")
    assert ended.code == 0
    warnings = [line for line in ended.err if "update skipped" in line]
    assert re.match(r"step \d: the gradient norm is (nan|inf): update skipped, 1 so far$", warnings[0])
    summary = json.loads((workplace.folder / "diverged" / "summary.json").read_text())
    assert summary["skipped_steps"] == len(warnings) >= 4
    assert summary["last_loss"] is None
    assert summary["best_loss"] == summary["first_loss"] > 0
    assert f"skipped_steps {len(warnings)}" in next(line for line in ended.out if line.startswith("step 6 "))
