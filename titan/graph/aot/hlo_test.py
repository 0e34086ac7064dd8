"""Reading optimized HLO: a program written by hand, in the forms that XLA:TPU prints."""

import textwrap

import pytest

from titan.graph.aot.collectives import CollectiveGroup, find_collectives, group_collectives
from titan.graph.aot.hlo import HBM, HOST, VMEM, Array, parse_arrays, parse_hlo
from titan.graph.aot.kernels import count_kernels
from titan.graph.aot.origin import Origin, origin
from titan.parallel.mesh import MeshSpec

_HEADER = "HloModule jit_run, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }"

_PROGRAM = textwrap.dedent(
    """\
    %add (a: f32[], b: f32[]) -> f32[] {
      %a = f32[] parameter(0)
      %b = f32[] parameter(1)
      ROOT %sum = f32[] add(%a, %b)
    }

    %all-reduce-scatter.1 (input: f32[16,128]) -> f32[8,128] {
      %input = f32[16,128]{1,0:T(8,128)} parameter(0)
      %all-reduce.9 = f32[16,128]{1,0:T(8,128)} all-reduce(%input), channel_id=3, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
      ROOT %slice.9 = f32[8,128]{1,0:T(8,128)} slice(%all-reduce.9), slice={[0:8], [0:128]}
    }

    %called (p: bf16[2,128]) -> bf16[8,128] {
      %p = bf16[2,128]{1,0:T(8,128)(2,1)} parameter(0)
      ROOT %gather.1 = bf16[8,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=4, replica_groups=[2,4]<=[8], dimensions={0}
    }

    %body (carry: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
      %carry = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
      %index = s32[]{:T(128)} get-tuple-element(%carry), index=0
      %value = f32[8,128]{1,0:T(8,128)} get-tuple-element(%carry), index=1
      %permute = f32[8,128]{1,0:T(8,128)} collective-permute(%value), channel_id=5, source_target_pairs={{0,1},{1,0}}
      ROOT %next = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%index, %permute)
    }

    %condition (carry.1: (s32[], f32[8,128])) -> pred[] {
      %carry.1 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
      ROOT %more = pred[]{:T(512)} constant(true)
    }

    ENTRY %main (x: f32[16,128], w: bf16[2,128]) -> (f32[16,128], f32[]) {
      %x = f32[16,128]{1,0:T(8,128)} parameter(0), metadata={op_name="x"}
      %w = bf16[2,128]{1,0:T(8,128)(2,1)} parameter(1)
      %start = ((bf16[2,128]{1,0:T(8,128)(2,1)}), bf16[8,128]{1,0:T(8,128)(2,1)}) call-start(%w), async_execution_thread="sparsecore", to_apply=%called, metadata={op_name="jit(run)/shard_map/forward/head/all_gather"}
      %saved = f32[1000,128]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%add, metadata={op_name="jit(run)/shard_map/forward/layers.0.mlp/mul"}
      %kernel.3 = f32[8,128]{1,0:T(8,128)S(1)} custom-call(%saved), custom_call_target="tpu_custom_call", metadata={op_name="jit(run)/two
    lines"}
      %done = bf16[8,128]{1,0:T(8,128)(2,1)} call-done(%start)
      %scattered = f32[8,128]{1,0:T(8,128)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
      %one = s32[]{:T(128)} constant(1)
      %looped = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%one, %scattered)
      %while = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%looped), condition=%condition, body=%body
      %result = f32[8,128]{1,0:T(8,128)} get-tuple-element(%while), index=1
      %updated = f32[16,128]{1,0:T(8,128)} fusion(%saved, %done, %result), kind=kLoop, calls=%add, metadata={op_name="jit(run)/shard_map/backward/layers.0.mlp/mul"}
      %loss = f32[]{:T(128)} all-reduce(%one), channel_id=7, replica_groups={}, to_apply=%add
      ROOT %outputs = (f32[16,128]{1,0:T(8,128)}, f32[]{:T(128)}) tuple(%updated, %loss)
    }
    """  # noqa: E501 (as XLA prints it)
)


@pytest.mark.parametrize(
    ("shape", "expected", "num_bytes", "padded_bytes"),
    [
        ("f32[3,5]{1,0:T(8,128)}", Array("f32", (3, 5), (1, 0), (8, 128), HBM), 60, 8 * 128 * 4),
        ("f32[3,5]{0,1:T(8,128)S(1)}", Array("f32", (3, 5), (0, 1), (8, 128), VMEM), 60, 8 * 128 * 4),
        ("bf16[2,9,130]{2,1,0:T(8,128)(2,1)}", Array("bf16", (2, 9, 130), (2, 1, 0), (8, 128), HBM), 4680, 16384),
        ("s32[300]{0:T(256)S(5)}", Array("s32", (300,), (0,), (256,), HOST), 1200, 2048),
        ("pred[7]{0}", Array("pred", (7,), (0,), (), HBM), 7, 7),
        ("f8e4m3fn[4,4]", Array("f8e4m3fn", (4, 4), (), (), HBM), 16, 16),
        ("u32[]", Array("u32", (), (), (), HBM), 4, 4),
    ],
)
def test_shapes_and_their_sizes(shape, expected, num_bytes, padded_bytes):
    (array,) = parse_arrays(shape)
    assert array == expected
    assert (array.num_bytes, array.padded_bytes) == (num_bytes, padded_bytes)


def test_a_tuple_is_its_arrays():
    arrays = parse_arrays("((f32[2]{0:T(128)}, token[]), /*index=1*/bf16[8,4]{1,0})")
    assert list(map(str, arrays)) == ["f32[2]", "token[]", "bf16[8,4]"]
    assert [array.num_bytes for array in arrays] == [8, 0, 64]


def test_instructions_in_order_and_the_calls_between_computations():
    module = parse_hlo(f"{_HEADER}\n\n{_PROGRAM}")
    assert module.entry == "main"
    names = [instruction.name for instruction in module.computations["main"]]
    assert names[:3] == ["x", "w", "start"]
    assert names[-1] == "outputs"
    fused = next(i for i in module.computations["main"] if i.name == "updated")
    assert (fused.opcode, fused.operands, fused.called) == ("fusion", ("saved", "done", "result"), ("add",))
    assert [caller.name for caller in module.calls_to("body")] == ["while"]
    assert count_kernels(module) == {"kernel": 1}


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        parse_hlo(_HEADER)


def test_collectives_by_axis_kind_and_form():
    mesh = MeshSpec(("dp_replicate", "dp_shard"), (2, 4))
    groups = set(group_collectives(find_collectives(parse_hlo(_PROGRAM), mesh)))
    assert groups == {
        CollectiveGroup("dp_replicate", "reduce-scatter", 1, 16 * 128 * 4, asynchronous=False, in_loop=False),
        CollectiveGroup("dp_shard", "all-gather", 1, 8 * 128 * 2, asynchronous=True, in_loop=False),
        CollectiveGroup("dp_shard", "collective-permute", 1, 8 * 128 * 4, asynchronous=False, in_loop=True),
        CollectiveGroup("dp_replicate x dp_shard", "all-reduce", 1, 4, asynchronous=False, in_loop=False),
    }


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("[4,2]<=[2,2,2]T(0,2,1)", "b"),
        ("[4,2]<=[2,4]T(1,0)", "a"),
        ("[2,4]<=[8]", "b x c"),
        ("[4,2]<=[8]", "c"),
        ("{{0,2,4,6},{1,3,5,7}}", "a x b"),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", "none"),
    ],
)
def test_groups_of_devices_are_mesh_axes(groups, axes):
    program = textwrap.dedent(
        f"""\
        ENTRY %main (x: f32[8]) -> f32[8] {{
          %x = f32[8]{{0}} parameter(0)
          ROOT %y = f32[8]{{0}} all-to-all(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}
        }}
        """
    )
    (found,) = find_collectives(parse_hlo(program), MeshSpec(("a", "b", "c"), (2, 2, 2)))
    assert found.axes == axes


def test_parts_of_one_fused_collective_count_once():
    part = 'all-gather(%x), replica_groups={{0,1}}, frontend_attributes={chain_id="3"}'
    program = f"""\
%async_collective_fusion.1 (x: f32[8]) -> f32[16] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %a.1 = f32[16]{{0}} {part}
}}
%async_collective_fusion.2 (x.1: f32[8]) -> f32[16] {{
  %x.1 = f32[8]{{0}} parameter(0)
  ROOT %a.2 = f32[16]{{0}} {part}
}}
ENTRY %main (y: f32[8]) -> f32[16] {{
  %y = f32[8]{{0}} parameter(0)
  %b.1 = f32[16]{{0}} fusion(%y), kind=kCustom, calls=%async_collective_fusion.1
  ROOT %b.2 = f32[16]{{0}} fusion(%y), kind=kCustom, calls=%async_collective_fusion.2
}}
"""
    (group,) = group_collectives(find_collectives(parse_hlo(program), MeshSpec(("a",), (2,))))
    assert group == CollectiveGroup("a", "all-gather", 1, 64, asynchronous=True, in_loop=False)


@pytest.mark.parametrize(
    ("op_name", "expected", "text"),
    [
        ("jit(run)/shard_map/forward/layers.0.wq/dot_general", Origin("forward", "layers.0.wq", "dot_general"),
         "layers.0.wq (forward) dot_general"),
        ("jit(run)/shard_map/optimizer/jit(_where)/select_n", Origin("optimizer", "", "jit(_where)/select_n"),
         "the step (optimizer) select_n"),
        ("jit(run)/shard_map/backward/mul", Origin("backward", "", "mul"), "the step (backward) mul"),
        ("jit(run)/psum", Origin("", "", "psum"), "psum"),
        ("", Origin("", "", ""), "the compiler"),
    ],
)  # fmt: skip
def test_origin(op_name, expected, text):
    assert origin(op_name) == expected
    assert str(expected) == text
