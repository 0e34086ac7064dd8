"""The model of a step's time, against arithmetic; and its clock, against the compiler's estimate for a matmul."""

import re

import jax
import jax.numpy as jnp
import pytest

from titan.core.hardware import HARDWARE
from titan.graph.aot.collectives import find_collectives
from titan.graph.aot.hlo import parse_hlo
from titan.graph.aot.loops import trip_count
from titan.graph.aot.timing import Links, step_time
from titan.kernels.tpu_compile import compile_for_tpu
from titan.parallel.mesh import MeshSpec

_CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
_COST = '"cost_estimate":{"flops":"%d","transcendentals":"0","bytes_accessed":"%d"}'
_KERNEL = 'custom-call(%x), custom_call_target="tpu_custom_call", backend_config={'
_PROGRAM = f"""\
%product (a: f32[8,128], b: f32[128,128]) -> f32[8,128] {{
  %a = f32[8,128]{{1,0}} parameter(0)
  %b = f32[128,128]{{1,0}} parameter(1)
  ROOT %dot = f32[8,128]{{1,0}} convolution(%a, %b), dim_labels=bf_io->bf
}}
%body (c: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %c = (s32[], f32[8,128]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %v = f32[8,128]{{1,0}} get-tuple-element(%c), index=1
  %in_loop = f32[8,128]{{1,0}} fusion(%v), kind=kLoop, calls=%nothing, {_CYCLES % 1000}
  %summed = f32[8,128]{{1,0}} all-reduce(%in_loop), replica_groups={{{{0,1,2,3}}}}, to_apply=%nothing
  %scattered = f32[2,128]{{1,0}} fusion(%in_loop), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %t = (s32[], f32[8,128]{{1,0}}) tuple(%i, %summed)
}}
%all-reduce-scatter.1 (s: f32[8,128]) -> f32[2,128] {{
  %s = f32[8,128]{{1,0}} parameter(0)
  %whole = f32[8,128]{{1,0}} all-reduce(%s), replica_groups={{{{0,1,2,3}}}}, to_apply=%nothing
  ROOT %part = f32[2,128]{{1,0}} slice(%whole), slice={{[0:2], [0:128]}}
}}
%condition (d: (s32[], f32[8,128])) -> pred[] {{
  %d = (s32[], f32[8,128]{{1,0}}) parameter(0)
  %j = s32[] get-tuple-element(%d), index=0
  %bound = s32[] constant(7)
  ROOT %less = pred[] compare(%j, %bound), direction=LT
}}
%nothing (n: f32[8,128]) -> f32[8,128] {{
  ROOT %n = f32[8,128]{{1,0}} parameter(0)
}}
ENTRY %main (x: f32[8,128], w: f32[128,128]) -> f32[8,128] {{
  %x = f32[8,128]{{1,0}} parameter(0)
  %w = f32[128,128]{{1,0}} parameter(1)
  %matmul = f32[8,128]{{1,0}} fusion(%x, %w), kind=kOutput, calls=%product, {_CYCLES % 5000}
  %cheap.1 = f32[8,128]{{1,0}} {_KERNEL}{_COST % (918 * 10**9, 8)}}}
  %cheap.2 = f32[8,128]{{1,0}} {_KERNEL}{_COST % (8, 1640 * 10**9)}}}
  %silent.3 = f32[8,128]{{1,0}} {_KERNEL}}}
  %gathered = f32[32,128]{{1,0}} all-gather(%x), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
  %one = s32[] constant(0)
  %start = (s32[], f32[8,128]{{1,0}}) tuple(%one, %matmul)
  %loop = (s32[], f32[8,128]{{1,0}}) while(%start), condition=%condition, body=%body
  ROOT %result = f32[8,128]{{1,0}} get-tuple-element(%loop), index=1
}}
"""


def test_time_is_what_the_compiler_estimates_and_kernels_declare():
    module = parse_hlo(_PROGRAM)
    mesh = MeshSpec(("dp_shard",), (4,))
    links = Links(HARDWARE["v6e"], (2, 2))
    time = step_time(module, find_collectives(module, mesh), links, {"dp_shard": 4}, {"si": 918e12})
    clock = 918e12 / 2**19  # 4 units of 256 x 256 multiply-adds
    assert time.matmuls == pytest.approx(5000 / clock)
    assert time.other == pytest.approx(7 * 1000 / clock)  # the loop has seven turns
    assert time.kernels == pytest.approx(1e-3 + 1.0 + 1.0)  # FLOPs at the peak, bytes at the bandwidth, and the given
    assert time.undeclared == ("silent",)
    # Two links, one for each neighbour; three quarters of each array, and an all-reduce twice.
    gather, reduce, scatter = 32 * 128 * 4, 8 * 128 * 4, 8 * 128 * 4
    assert time.exposed_collectives == pytest.approx(0.75 * (gather + 7 * (2 * reduce + scatter)) / 200e9)
    assert time.total == time.matmuls + time.other + time.kernels + time.exposed_collectives


def test_bound_of_a_loop_may_be_in_a_fusion():
    fused = """\
%bound (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %limit = s32[] constant(12)
  ROOT %less = pred[] compare(%p, %limit), direction=LT
}
"""
    plain = "  %bound = s32[] constant(7)\n  ROOT %less = pred[] compare(%j, %bound), direction=LT\n"
    assert plain in _PROGRAM
    program = fused + _PROGRAM.replace(plain, "  ROOT %less = pred[] fusion(%j), kind=kLoop, calls=%bound\n")
    for text, turns in ((_PROGRAM, 7), (program, 12)):
        module = parse_hlo(text)
        (loop,) = [instruction for _, instruction in module.instructions() if instruction.opcode == "while"]
        assert trip_count(module, loop) == turns


@pytest.mark.parametrize(
    ("generation", "shape", "links"),
    [("v6e", (2, 4), 2), ("v5e", (16, 16), 4), ("v5p", (4, 4, 8), 6), ("v5p", (2, 2, 4), 3), ("tpu7x", (4, 4, 4), 3)],
)
def test_links_of_a_device(generation, shape, links):
    hardware = HARDWARE[generation]
    assert Links(hardware, shape).bytes_per_second == links * hardware.ici_link_bytes_per_second


@pytest.mark.parametrize("generation", ["v5e", "v5p", "v6e", "tpu7x"])
def test_clock_fits_the_compilers_estimate_of_a_matmul(generation):
    shape = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    program = compile_for_tpu(lambda a, b: a @ b, shape, shape, generation=generation)
    cycles = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', program.compiled.as_text())))
    share_of_peak = 2 * 8192**3 / cycles / HARDWARE[generation].mxu_flops_per_cycle
    assert 0.65 < share_of_peak < 1
