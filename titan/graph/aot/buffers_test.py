"""Buffers from the compiler's own files: a small program in the form that XLA:TPU writes."""

import dataclasses

from titan.graph.aot.buffers import LiveBuffer, live_at_peak, temporaries, usage
from titan.graph.aot.compiler_dump import CompilerDump, read_dump
from titan.graph.aot.hlo import HOST, parse_hlo
from titan.graph.aot.memory import memory_of
from titan.graph.aot.out_of_memory import out_of_device_memory

_SCOPE = "jit(run)/shard_map"
_HLO = f"""\
HloModule jit_run, is_scheduled=true

ENTRY %main (w: bf16[2,128]) -> f32[8,128] {{
  %w = bf16[2,128]{{1,0}} parameter(0), metadata={{op_name="w"}}
  %gathered = bf16[8,128]{{1,0}} all-gather(%w), metadata={{op_name="{_SCOPE}/forward/head/parameter/all_gather"}}
  %saved = f32[1000,128]{{1,0}} fusion(%gathered), kind=kLoop, metadata={{op_name="{_SCOPE}/forward/layers.0.mlp/mul"}}
  %fast = f32[1000,128]{{1,0:S(1)}} copy(%saved)
  %grad = f32[16,128]{{1,0}} fusion(%fast, %gathered), metadata={{op_name="{_SCOPE}/backward/layers.0.mlp/mul"}}
  %copied = f32[16,128]{{1,0}} copy(%grad)
  ROOT %updated = f32[8,128]{{1,0}} fusion(%copied), kind=kLoop, metadata={{op_name="{_SCOPE}/optimizer/add"}}
}}
"""
_ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 512, thread-local:
 value: <1 local @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 512, parameter 0, shape |bf16[2,128]| at ShapeIndex {}:
 value: <2 w @0> (size=512,offset=0): bf16[2,128]{1,0}
allocation 2: size 4096, maybe-live-out:
 value: <3 updated @0> (size=4096,offset=0): f32[8,128]{1,0}
allocation 3: size 512000, color 1, preallocated-temp:
 value: <4 fast @1> (size=512000,offset=0): f32[1000,128]{1,0:S(1)}
allocation 4: size 999999, preallocated-temp:
 value: <5 gathered @0> (size=2048,offset=0): bf16[8,128]{1,0}
 value: <6 saved @0> (size=512000,offset=2048): f32[1000,128]{1,0}
 value: <7 grad{} @0> (size=8192,offset=514048): f32[16,128]{1,0}
 value: <8 copied @0> (size=8192,offset=0): f32[16,128]{1,0}
"""
_LIVE_RANGES = """\
HloLiveRange (max 7):
  InstructionSequence:
    0:w
    1:gathered
    2:saved
    3:fast
    4:grad
    5:copied
    6:updated
  BufferLiveRange:
    w{}:0-7
    gathered{}:1-4
    saved{}:2-3
    fast{}:3-4
    grad{}:4-5
    copied{}:5-6
    updated{}:6-7
  Live ranges at 3 (peak):
    w{}: 512 bytes (cumulative: 512 bytes)
"""
_DUMP = CompilerDump(_HLO, "", _ASSIGNMENT, _LIVE_RANGES)


def test_temporaries_are_what_is_no_argument_and_in_this_memory():
    buffers = {one.shape: one for one in temporaries(_DUMP, parse_hlo(_HLO)) if one.shape != "f32[16,128]"}
    assert set(buffers) == {"f32[8,128]", "bf16[8,128]", "f32[1000,128]"}
    # The reader of `saved` is a copy that the compiler made up: what counts is who reads that.
    assert buffers["f32[1000,128]"] == LiveBuffer(
        512000,
        "f32[1000,128]",
        "fusion",
        f"{_SCOPE}/forward/layers.0.mlp/mul",
        f"{_SCOPE}/backward/layers.0.mlp/mul",
        2,
        3,
    )
    assert temporaries(_DUMP, parse_hlo(_HLO), HOST) == []


def test_usage_over_the_schedule():
    early = LiveBuffer(10, "f32[2]", "fusion", "", "", 0, 3)
    late = LiveBuffer(4, "f32[1]", "fusion", "", "", 3, 5)
    assert usage([("a", early), ("b", late)], 6) == {"a": (10, 10, 10, 10, 0, 0), "b": (0, 0, 0, 4, 4, 4)}
    assert usage([("a", early), ("b", late)], 2) == {"a": (10, 10), "b": (0, 4)}
    assert usage([], 5) == {}


def test_kinds_at_the_peak():
    buffers = temporaries(_DUMP, parse_hlo(_HLO))
    assert [one.bytes for one in live_at_peak(buffers)] == [512000, 2048]
    at_once = [dataclasses.replace(one, first=2, last=2) for one in buffers]
    arguments = {"parameters": 512, "optimizer_state": 0, "batch": 0}
    memory = memory_of(at_once, fits=False, needed=10**6, capacity=10**5, arguments=arguments)
    assert memory.at_peak == {
        "saved activations": 512000, "gradients": 2 * 8192, "temporaries": 4096, "gathered parameters": 2048
    }  # fmt: skip
    assert not memory.fits
    gradients = next(row for row in memory.largest if row.kind == "gradients")
    assert (gradients.bytes, gradients.count, gradients.made_by) == (16384, 2, "layers.*.mlp (backward) mul")


def test_a_gathered_activation_is_no_gathered_parameter():
    (gathered,) = (one for one in temporaries(_DUMP, parse_hlo(_HLO)) if one.opcode == "all-gather")
    of_tokens = dataclasses.replace(gathered, op_name=gathered.op_name.replace("/parameter/", "/"))
    arguments = {"parameters": 512, "optimizer_state": 0, "batch": 0}
    memory = memory_of([gathered, of_tokens], fits=True, needed=4096, capacity=10**5, arguments=arguments)
    assert memory.at_peak == {"gathered parameters": 2048, "saved activations": 2048}


def test_the_files_of_a_compilation(tmp_path):
    prefix = "module_0000.jit_run.cl_1.after_optimizations"
    (tmp_path / f"{prefix}.txt").write_text(_HLO)
    (tmp_path / f"{prefix}-buffer-assignment.txt").write_text(_ASSIGNMENT)
    (tmp_path / f"{prefix}-live-range.txt").write_text(_LIVE_RANGES)
    (tmp_path / f"{prefix}_before_buffer_assignment.txt").write_text("another stage")
    assert read_dump(tmp_path) == _DUMP


def test_out_of_memory_errors():
    error = out_of_device_memory(
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (18.93G) exceeds "
        "available HBM (15.75G)."
    )
    assert (error.needed_bytes, error.available_bytes) == (round(18.93 * 2**30), round(15.75 * 2**30))
    assert str(error) == "a device needs 18.93 GiB of memory and has 15.75 GiB"
    error = out_of_device_memory("Ran out of memory in memory space hbm. Used 512.50M of 31.25G hbm. Exceeded")
    assert error.needed_bytes == round(512.5 * 2**20)
    assert out_of_device_memory("INVALID_ARGUMENT: No such compile option") is None
