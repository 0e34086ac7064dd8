"""Loops and memory policies as the TPU compiler sees them, against arithmetic on the model's own sizes."""

import functools

import pytest

from titan.core.config.flags import parse
from titan.graph.aot.report import Report
from titan.train.aot.command import compile_ahead_of_time
from titan.train.config.run import Config

_DIM, _FFN, _VOCAB, _SEQUENCE, _BATCH, _DEVICES = 256, 1024, 512, 256, 16, 8
_BFLOAT16 = 2
# Of one layer what gradients need: queries and the output, keys and values of half as many heads, gate and up.
_NEEDED_MATRICES = 2 * _DIM * _DIM + 2 * _DIM * _DIM // 2 + 2 * _DIM * _FFN


@functools.cache
def _report(policy: str, num_layers: int, *flags: str) -> Report:
    sizes = (
        f"--model.num_layers={num_layers}",
        f"--model.vocab_size={_VOCAB}",
        f"--tokenizer.vocab_size={_VOCAB}",
        f"--training.sequence_length={_SEQUENCE}",
        f"--training.batch_size={_BATCH}",
        "--parallelism.gather_dtype=bfloat16",
        f"--compile.memory_policy={policy}",
    )
    return compile_ahead_of_time(parse(["llama3_debug", "--aot", "--hardware=v6e-2x4", *sizes, *flags], Config()))


def _scanned(policy: str) -> Report:
    return _report(policy, 4, "--tpu_config.use_scan_layers")


def _layer_input_bytes(num_layers: int) -> int:
    return num_layers * (_BATCH // _DEVICES) * _SEQUENCE * _DIM * _BFLOAT16


@pytest.mark.parametrize(
    ("report", "num_layers"),
    [(lambda: _report("offload", 2), 2), (lambda: _scanned("offload"), 4)],
    ids=["unrolled", "scan"],
)
def test_offloaded_layer_inputs_are_in_host_memory(report, num_layers):
    assert report().memory.host == pytest.approx(_layer_input_bytes(num_layers), rel=0.05)


def test_without_offload_host_memory_is_unused_and_device_memory_is_used():
    without, offloaded = _scanned("full").memory, _scanned("offload").memory
    assert without.host == 0
    # Copying makes the program longer, which counts as needed too. A layer or two are on the device at any time.
    saved = (without.needed - without.program) - (offloaded.needed - offloaded.program)
    assert saved >= _layer_input_bytes(4 - 2)


def test_what_is_made_again_is_in_the_program():
    """The compiler merges no op with the one that it repeats."""
    none, offload = _report("none", 2).compute, _report("offload", 2).compute
    tokens = _BATCH * _SEQUENCE
    again = 2 * 2 * tokens * (_NEEDED_MATRICES + 2 * _SEQUENCE * _DIM)  # two layers; scores and their use
    assert offload.model_flops == none.model_flops
    assert offload.compiled_flops - none.compiled_flops == pytest.approx(again, rel=0.02)


def test_collectives_of_layers_are_in_loops():
    rows = _scanned("full").collectives
    gathers = {row.in_loop: (row.count, row.bytes) for row in rows if row.kind == "all-gather"}
    layer_matrices = _NEEDED_MATRICES + _DIM * _FFN
    # Forward and backward have the seven matrices of a layer each; embedding and head are gathered once, outside.
    assert gathers == {
        True: (14, 2 * layer_matrices * _BFLOAT16),
        False: (2, 2 * _VOCAB * _DIM * _BFLOAT16),
    }
    unrolled = _report("none", 2).collectives
    assert not any(row.in_loop for row in unrolled)
