"""Ahead-of-time compilation, against arithmetic on the model's own sizes; the compiler is the real one."""

import dataclasses
import importlib.util
import json
import math
import types
from xml.etree import ElementTree

import pytest

from titan.core.config.flags import parse
from titan.core.config.validate import ConfigError
from titan.graph.aot.html import to_html
from titan.graph.aot.memory import BETWEEN
from titan.graph.aot.report import differences, from_json, to_json
from titan.graph.aot.text import to_text
from titan.graph.executors.xla import LoweredStep
from titan.train.aot import command as aot
from titan.train.aot.advice import advice
from titan.train.aot.command import compile_ahead_of_time
from titan.train.config.run import Config
from titan.train.runtime.saved_step import open_saved_step

_DIM, _FFN, _VOCAB, _LAYERS, _SEQUENCE = 256, 1024, 512, 2, 128
# Of one layer: queries and the output, keys and values of half as many heads, feed-forward.
_LAYER_MATRICES = (_DIM * _DIM,) * 2 + (_DIM * _DIM // 2,) * 2 + (_DIM * _FFN,) * 3
_MATRICES = 2 * _VOCAB * _DIM + _LAYERS * sum(_LAYER_MATRICES)  # with embedding and head
_NORMS = (2 * _LAYERS + 1) * _DIM
_SMALL = (
    f"--model.num_layers={_LAYERS}",
    f"--model.vocab_size={_VOCAB}",
    f"--tokenizer.vocab_size={_VOCAB}",
    f"--training.sequence_length={_SEQUENCE}",
    "--parallelism.gather_dtype=bfloat16",
)


def config_of(hardware, *flags):
    return parse(["llama3_debug", "--aot", f"--hardware={hardware}", *_SMALL, *flags], Config())


def bytes_by(report):
    return {(row.axes, row.kind): row.bytes for row in report.collectives}


@pytest.fixture(scope="module")
def fsdp():
    return compile_ahead_of_time(config_of("v6e-2x2"))


_SLICES = ("2*v6e-2x2", "--parallelism.data_parallel_replicate=2", "--compile.tpu_flag_bundles=no_latency_hiding")


@pytest.fixture(scope="module")
def slices(tmp_path_factory):
    """The report on a program for two slices, and the folder that the program was saved to."""
    folder = tmp_path_factory.mktemp("saved") / "step"
    return types.SimpleNamespace(
        report=compile_ahead_of_time(config_of(*_SLICES, f"--aot.save={folder}")), folder=folder
    )


def test_memory_is_that_of_the_shards(fsdp):
    memory = fsdp.memory
    assert memory.parameters == 4 * (_MATRICES + _NORMS) // 4  # float32, a quarter on each device
    assert memory.optimizer_state == 2 * memory.parameters + 2 * 4  # both moments and two counters
    assert memory.batch == 4 * 16 * _SEQUENCE * 4 // 4 + 4  # four int32 tensors, a quarter of the rows; learning rate
    assert memory.fits
    assert (
        memory.parameters + memory.optimizer_state + memory.batch <= memory.needed <= memory.capacity == 31.25 * 2**30
    )


def test_each_weight_is_gathered_for_forward_and_backward_and_its_gradient_scattered_once(fsdp):
    counts = {row.kind: row.count for row in fsdp.collectives}
    num_in_layers = _LAYERS * len(_LAYER_MATRICES)
    assert counts["reduce-scatter"] == num_in_layers + 2
    assert counts["all-gather"] == 2 * num_in_layers + 2  # embedding and head once
    sizes = bytes_by(fsdp)
    assert sizes["dp_shard", "all-gather"] == 2 * (_MATRICES + _LAYERS * sum(_LAYER_MATRICES))  # bfloat16
    assert sizes["dp_shard", "reduce-scatter"] == 4 * _MATRICES  # float32
    assert not any(row.in_loop for row in fsdp.collectives)


def test_collectives_of_split_layers_and_sequences_are_those_of_their_axes():
    split = ("--parallelism.tensor_parallel=2", "--parallelism.context_parallel=2", "--tpu_config.use_scan_layers")
    report = compile_ahead_of_time(config_of("v6e-2x4", *split))
    assert report.mesh == "dp_shard=2 x cp=2 x tp=2"
    rows = {(row.axes, row.kind, row.in_loop): (row.count, row.bytes) for row in report.collectives}
    # bfloat16, as all of these but the gradients. Half of the rows, and of each row's tokens.
    tokens = 2 * (16 // 2) * (_SEQUENCE // 2) * _DIM
    for kind in ("all-gather", "reduce-scatter"):
        assert rows["tp", kind, True] == (4, 4 * tokens)  # attention and feed-forward, in both directions
        assert rows["tp", kind, False] == (2, 2 * tokens)  # embedding and loss
    # Weights along the inner axis: half of what a device has of a layer, for forward and backward.
    weights = 2 * sum(_LAYER_MATRICES) // 2 // 2
    # Of half of the rows and half of the heads, with all tokens.
    keys = 2 * (16 // 2) * _SEQUENCE * (_DIM // 2) // 2
    assert rows["cp", "all-gather", True] == (2 * len(_LAYER_MATRICES) + 2, 2 * weights + 2 * keys)


def test_flops_are_those_of_the_model_and_a_little_more(fsdp):
    tokens = 16 * _SEQUENCE
    matmuls = 6 * (_MATRICES - _VOCAB * _DIM)  # the embedding is looked up
    attention = 6 * _LAYERS * _SEQUENCE * _DIM  # causal: half of forward and backward
    assert fsdp.compute.model_flops == tokens * (matmuls + attention)
    assert 1 <= fsdp.compute.compiled_flops / fsdp.compute.model_flops < 1.2


def test_modelled_time_is_of_the_order_of_the_peak(fsdp):
    # A model this small is far from the peak, and no faster.
    assert 0 < fsdp.modelled.mfu < 0.5
    seconds = (fsdp.modelled.matmuls, fsdp.modelled.other, fsdp.modelled.exposed_collectives)
    assert all(seconds)
    assert fsdp.modelled.step_seconds == pytest.approx(sum(seconds) + fsdp.modelled.kernels)
    assert fsdp.modelled.tokens_per_second_per_chip == pytest.approx(16 * _SEQUENCE / 4 / fsdp.modelled.step_seconds)


def test_report_is_json_and_text_and_can_be_compared(fsdp):
    assert from_json(to_json(fsdp)) == fsdp
    with pytest.raises(ValueError, match="no report of this version"):
        from_json(json.dumps({"name": "x"}))
    assert " cl/" in fsdp.versions["TPU compiler"]
    text = to_text(fsdp)
    assert "llama3_debug on v6e-2x2: 4 devices, 4 chips, mesh dp_shard=4; 16 x 128 = 2,048 tokens a step" in text
    assert "memory     fits: peak " in text
    page = ElementTree.fromstring(to_html(fsdp).removeprefix("<!doctype html>").replace('<meta charset="utf-8">', ""))
    assert [part.get("aria-label") for part in page.iter("svg")] == [
        "memory by kind", "memory over the schedule", "collectives by axis"
    ]  # fmt: skip
    assert len(list(page.findall(".//svg[@aria-label='memory over the schedule']/polygon"))) > 1
    assert differences(fsdp, fsdp) == []
    memory = dataclasses.replace(fsdp.memory, parameters=2 * fsdp.memory.parameters, fits=False)
    changed = dataclasses.replace(
        fsdp, memory=memory, collectives=fsdp.collectives[1:], compiler_options={"xla_a": "true"}
    )
    assert differences(fsdp, changed) == [
        "memory.fits: True -> False",
        f"memory.parameters: {fsdp.memory.parameters:,} -> {memory.parameters:,}  (2.000x)",
        f"collectives.dp_shard.reduce-scatter.count: {fsdp.collectives[0].count} -> none",
        f"collectives.dp_shard.reduce-scatter.bytes: {fsdp.collectives[0].bytes:,} -> none",
        "compiler_options.xla_a: none -> true",
    ]


def test_several_slices_are_one_program_that_sums_gradients_between_them(slices):
    report = slices.report
    assert (report.num_devices, report.mesh) == (8, "dp_replicate=2 x dp_shard=4")
    sizes = bytes_by(report)
    between = sizes["between slices", "all-reduce"]
    # The shard of each gradient in float32; the sums of three scalars may come on top.
    assert math.isclose(between, 4 * (_MATRICES + _NORMS) / 4, rel_tol=2e-3)
    assert sizes["dp_shard", "all-gather"] == 2 * (_MATRICES + _LAYERS * sum(_LAYER_MATRICES))
    assert report.compiler_options == {"xla_tpu_enable_latency_hiding_scheduler": "false"}
    assert "\noptions    xla_tpu_enable_latency_hiding_scheduler=false\n" in to_text(report)
    assert "<code>xla_tpu_enable_latency_hiding_scheduler=false</code>" in to_html(report)


def test_a_saved_program_stands_for_compiling_where_the_step_is_the_same(slices, monkeypatch):
    folder = slices.folder
    step = open_saved_step(str(folder))
    assert step.fingerprint["hardware"] == "8 x TPU v6 lite (2 slices of 2x2x1 chips)"
    assert step.fingerprint["compiler_options.xla_tpu_enable_latency_hiding_scheduler"] == "false"
    assert step.executable.stat().st_size > 2**16

    monkeypatch.setattr(LoweredStep, "compile", lambda self: pytest.fail("compiled"))
    assert compile_ahead_of_time(config_of(*_SLICES, f"--aot.load={folder}", "--training.steps=100")) == slices.report
    with pytest.raises(ConfigError) as error:
        compile_ahead_of_time(config_of("v6e-2x4", "--model.num_layers=1", f"--aot.load={folder}"))
    assert str(error.value) == (
        f"--aot.load: {folder} holds another step: hardware is 8 x TPU v6 lite (2x4x1 chips) here and 8 x "
        "TPU v6 lite (2 slices of 2x2x1 chips) there, model.num_layers is 1 here and 2 there, "
        "parallelism.data_parallel_shard is 8 here and 4 there, and 3 more; give what it was saved with, or leave this "
        "out and save anew with --aot.save"
    )


def test_what_does_not_fit_is_named_with_its_module_and_a_cure():
    # Most of it is logits: the compiler takes minutes to arrange as many bytes of attention.
    flags = ("--training.batch_size=4096", "--model.num_layers=1", "--model.vocab_size=65536")
    flags += ("--parallelism.reshard_after_forward=false",)
    report = compile_ahead_of_time(config_of("v5e-2x2", *flags))
    memory = report.memory
    assert not memory.fits
    assert memory.needed > memory.capacity == 15.75 * 2**30
    num_rows = 4096 // 4 * _SEQUENCE
    largest = memory.largest[0]
    assert (largest.bytes, largest.shape) == (num_rows * 65536 * 4, f"f32[{num_rows},65536]")  # the logits
    assert largest.made_by.startswith(("head (loss)", "cross_entropy (loss)"))
    assert memory.needed == pytest.approx(
        memory.parameters + memory.optimizer_state + memory.batch + sum(memory.at_peak.values()), rel=0.2
    )
    assert memory.advice[0].startswith("--training.microbatches=4: 256 rather than 1024 sequences at a time")
    assert "DOES NOT FIT: needs" in to_text(report)


def test_advice_names_the_smallest_change_that_should_fit_first(fsdp):
    gib = 2**30
    memory = dataclasses.replace(
        fsdp.memory,
        needed=40 * gib,
        parameters=4 * gib,
        optimizer_state=8 * gib,
        at_peak={"saved activations": 16 * gib, "temporaries": 4 * gib, "gradients": 8 * gib},
        fits=False,
    )
    config = config_of("v6e-2x2", "--training.batch_size=32").resolve_devices(4)
    assert advice(config, memory) == (
        "--training.microbatches=2: 4 rather than 8 sequences at a time on a device (about 30.0 GiB)",
        "--compile.memory_policy=full: the backward pass computes each layer again from its input (about 24.0 GiB)",
        "--compile.memory_policy=offload: the same, and the layers' inputs wait in host memory (about 24.0 GiB)",
        "a --hardware with 4 times the chips, and 4 times the batch: parameters and optimizer state sharded over more "
        "devices (about 31.0 GiB)",
        "--splash_attention_kernel.enable: no matrix of all scores",
        "--fused_linear_cross_entropy.enable: never all logits at a time",
    )
    worse = dataclasses.replace(memory, needed=80 * gib)
    assert advice(config, worse)[0].endswith(
        "1 rather than 8 sequences at a time on a device (about 62.5 GiB, not enough alone)"
    )
    config = config_of("v6e-2x2", "--training.batch_size=4").resolve_devices(4)
    assert advice(config, memory)[0] == "--training.sequence_length=64: shorter sequences (about 30.0 GiB)"


def test_main_writes_the_report_and_compares(fsdp, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(aot, "compile_ahead_of_time", lambda config: fsdp)
    (tmp_path / "old.json").write_text(to_json(dataclasses.replace(fsdp, sequence_length=64)))
    new = f"{tmp_path}/new"
    flags = (f"--aot.report={new}/report.json", f"--aot.page={new}/report.html", f"--aot.compare={tmp_path}/old.json")
    assert aot.main(config_of("v6e-2x2", *flags)) == 0
    assert from_json((tmp_path / "new" / "report.json").read_text()) == fsdp
    assert (tmp_path / "new" / "report.html").read_text() == to_html(fsdp)
    assert "  sequence_length: 64 -> 128  (2.000x)\n" in capsys.readouterr().out
    monkeypatch.setattr(
        aot,
        "compile_ahead_of_time",
        lambda _: dataclasses.replace(fsdp, memory=dataclasses.replace(fsdp.memory, fits=False)),
    )
    assert aot.main(config_of("v6e-2x2", f"--aot.save={new}")) == 1
    assert capsys.readouterr().out.endswith(f"\nnot saved in {new}: it does not fit\n")


def test_without_libtpu_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--aot: compiling for a TPU needs the libtpu package; pip install libtpu=="):
        compile_ahead_of_time(config_of("v6e-2x2"))


def test_without_torch_tpu_one_line_says_how_to_get_it(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_tpu" else find_spec(name))
    with pytest.raises(
        ConfigError, match=r"^--aot.lowering: the torch_tpu package is not installed; pip install .*torch_tpu=="
    ):
        compile_ahead_of_time(config_of("v6e-2x2", "--aot.lowering=torch_tpu"))


@pytest.fixture(scope="module")
def split_flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    return "--tpu_config.use_graph_split", "--compile.memory_policy=full", f"--compile.cache_folder={folder}"


@pytest.fixture(scope="module")
def split(split_flags):
    return compile_ahead_of_time(config_of("v6e-2x2", *split_flags))


def test_a_split_step_is_the_sum_of_its_calls(split, fsdp):
    calls = {row.name: row.calls for row in split.programs}
    assert calls["layers.* forward"] == calls["layers.* backward"] == _LAYERS
    assert sum(calls.values()) == len(calls) - 2 + 2 * _LAYERS
    gathers, of_whole = ([row for row in report.collectives if row.kind == "all-gather"] for report in (split, fsdp))
    assert sum(row.count for row in gathers) == sum(row.count for row in of_whole)
    assert sum(row.bytes for row in gathers) == sum(row.bytes for row in of_whole)
    # Of a gradient's two forms of reduction, an all-reduce included, the compiler chooses one.
    reduced = sum(row.bytes for row in split.collectives if row.kind != "all-gather")
    assert 4 * _MATRICES <= reduced < 1.01 * 4 * _MATRICES  # float32
    # Layers are computed once more, of four parts of work a fourth at most.
    assert 1 < split.compute.compiled_flops / fsdp.compute.compiled_flops < 4 / 3
    assert split.modelled.step_seconds > 0


def test_memory_of_a_split_step(split, fsdp):
    memory = split.memory
    for name in ("parameters", "optimizer_state", "batch"):
        assert getattr(memory, name) == getattr(fsdp.memory, name)
    carry = (16 // 4) * _SEQUENCE * _DIM * 2  # what a layer is given, bfloat16
    assert memory.host == _LAYERS * carry
    assert memory.needed == max(row.peak for row in split.programs) <= memory.capacity and memory.fits
    rows = {row.name: row for row in split.programs}
    assert memory.needed == rows["layers.* backward"].peak
    # All gradients but the embedding's, what goes from layer to layer, this layer's input and the next one's; the mask
    # and the rotary embedding are smaller than a layer's input.
    gradients = memory.parameters - 4 * _VOCAB * _DIM // 4
    assert gradients + 3 * carry < memory.at_peak[BETWEEN] < gradients + 4 * carry
    # The optimizer's program has the whole state and all gradients.
    assert rows["backward, loss, optimizer"].held < carry
    # A layer's programs have all layers' weights, and leave alone the moments and the two large matrices outside.
    outside = memory.optimizer_state + 4 * 2 * _VOCAB * _DIM // 4
    assert outside <= rows["layers.* forward"].held < 1.05 * outside
    assert all(row.held < row.peak for row in split.programs)


def test_programs_of_a_split_step_are_kept(split, split_flags):
    again = compile_ahead_of_time(config_of("v6e-2x2", *split_flags))
    assert not any(row.was_kept for row in split.programs)
    assert all(row.was_kept for row in again.programs)
    # Nothing else differs, but for what was measured now.
    programs = tuple(dataclasses.replace(row, was_kept=False) for row in again.programs)
    assert dataclasses.replace(again, programs=programs, seconds=split.seconds) == split
    assert from_json(to_json(again)) == again
    assert "a split step: 6 programs" in to_text(again) and " by an earlier run" in to_text(again)
    assert "layers.* backward" in to_html(again)
