"""Segments, with JAX in TorchTPU's place: the rebuilt step must compute what the step computes.

What TorchTPU itself makes of a segment is compared in titan/train/integration/aot_torch_tpu_test.py.
"""

import dataclasses
import operator
import pickle

import jax
import numpy as np
import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.proxy_tensor import make_fx

from titan.graph.executors.xla import lower_xla, sharding
from titan.graph.lowering.lower import lower
from titan.graph.lowering.stablehlo_call import StableHloCall
from titan.graph.lowering.table import LoweringError
from titan.graph.testing.steps import HSDP, ONE, all_reduce, capture_metric, capture_training, ops
from titan.graph.testing.xla_cpu import use_cpu_devices
from titan.graph.torch_tpu import lower as torch_tpu
from titan.graph.torch_tpu.scopes import name_scopes
from titan.graph.torch_tpu.segment import Ref, Segment
from titan.graph.torch_tpu.split import split

use_cpu_devices(8)


def by_jax(segment: Segment) -> bytes:
    """A segment's StableHLO, a portable artifact, by titan's own lowering, from nothing but what the segment says."""
    aten = torch.ops.aten

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip((entry.name for entry in segment.inputs), tensors, strict=True)) | segment.constants
        for op in segment.ops:
            args, kwargs = torch.utils._pytree.tree_map(
                lambda entry: values[entry.name] if isinstance(entry, Ref) else entry, (op.args, op.kwargs)
            )
            if op.target == "getitem":
                values[op.name] = operator.getitem(*args)
                continue
            namespace, name, overload = op.target.split(".")
            assert namespace == "aten"
            values[op.name] = getattr(getattr(aten, name), overload)(*args, **kwargs)
        return tuple(values[name] for name in segment.outputs)

    inputs = [torch.empty(entry.shape, dtype=entry.dtype) for entry in segment.inputs]
    graph = make_fx(run, tracing_mode="fake")(*inputs)
    arrays = [jax.ShapeDtypeStruct(entry.shape, str(entry.dtype).removeprefix("torch.")) for entry in segment.inputs]
    return jax.export.export(jax.jit(lower(graph), keep_unused=True))(*arrays).mlir_module_serialized


@pytest.fixture
def jax_in_its_place(monkeypatch):
    monkeypatch.setattr(
        torch_tpu, "_lower", lambda segments: [by_jax(entry) for entry in pickle.loads(pickle.dumps(segments))]
    )


def run(graph):
    random = np.random.default_rng(0)
    executable = lower_xla(graph, jax.devices()).compile()
    state, batch = (
        {
            name: jax.device_put(
                random.normal(size=layout.shape).astype(np.float32), sharding(layout, graph.mesh, executable.mesh)
            )
            for name, layout in layouts.items()
        }
        for layouts in (graph.state, graph.batch)
    )
    new, metrics = executable(state, batch)
    return {name: np.array(array) for name, array in {**new, **metrics}.items()}


@pytest.mark.parametrize(("mesh", "num_segments"), [(ONE, 1), (HSDP, 3)], ids=["one device", "HSDP"])
def test_the_step_computes_the_same(jax_in_its_place, mesh, num_segments):
    graph = capture_training(mesh)
    segmented = torch_tpu.lower_by_torch_tpu(graph)
    calls = [node for node in ops(segmented) if isinstance(node.target, StableHloCall)]
    # Before the gathers, between them and the scatters, and after the sums over replicas.
    assert len(calls) == num_segments
    rest = {str(node.target) for node in ops(segmented)} - {str(node.target) for node in calls}
    assert not [name for name in rest if name.startswith("aten")]
    expected, actual = run(graph), run(segmented)
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        # The same ops in float32; XLA may fuse, and so round, them otherwise.
        np.testing.assert_allclose(actual[name], array, rtol=1e-5, atol=1e-5 * np.abs(array).max(), err_msg=name)


def test_ops_wait_for_the_last_of_their_arguments(jax_in_its_place):
    def metric(x, mesh):
        double = x * 2  # uses nothing that is communicated, and needs no segment of its own
        total = all_reduce(all_reduce(x, mesh, "dp_shard") + 1, mesh, "dp_replicate")
        return (total * double).sum()

    graph = capture_metric(metric, HSDP)
    stages = [[node.name for node in level.nodes] for level in split(graph.module.graph) if level.nodes]
    assert stages == [["mul"], ["add"], ["mul_1", "sum_1"]]
    np.testing.assert_allclose(run(torch_tpu.lower_by_torch_tpu(graph))["metric"], run(graph)["metric"], rtol=1e-6)


def test_the_bodies_of_loops_are_lowered_too(jax_in_its_place):
    def looped(x):
        return scan(lambda carry, row: (carry + row, (carry * row).sin()), x[0], x)[1].sum()

    captured = capture_metric(lambda x, mesh: x.sum())
    module = make_fx(looped, tracing_mode="fake")(torch.zeros(8, 8))
    for number, node in enumerate(module.graph.find_nodes(op="placeholder")):
        node.meta["leaf"] = list(captured.state)[number]
    segmented = torch_tpu.lower_by_torch_tpu(dataclasses.replace(captured, module=module))
    bodies = [part for part in segmented.module.modules() if isinstance(part, torch.fx.GraphModule)][1:]
    assert len(bodies) == 1
    targets = [node.target for body in bodies for node in body.graph.nodes if node.op == "call_function"]
    assert [
        target for target in targets if target is not operator.getitem and not isinstance(target, StableHloCall)
    ] == []
    assert any(isinstance(target, StableHloCall) for target in targets)
    assert any(node.target is torch.ops.higher_order.scan for node in ops(segmented))


def test_a_process_that_fails_is_one_line(monkeypatch):
    monkeypatch.setattr(torch_tpu, "_WORKER", "titan.graph.torch_tpu.no_such_worker")
    with pytest.raises(
        LoweringError, match=r"^TorchTPU's process ended with code 1: .*No module named .*no_such_worker$"
    ):
        torch_tpu.lower_by_torch_tpu(capture_metric(lambda x, mesh: x.sum()))


def test_ops_are_named_after_the_module_that_the_worker_runs_them_for():
    # As torch_tpu 0.2.0 writes it: the op, called in frames of which one is the worker's mark.
    text = """
%0 = stablehlo.add %a, %b : tensor<f32> loc(#loc9)
%1 = stablehlo.add %0, %b : tensor<f32> loc(#loc1)
#loc = loc(unknown)
#loc1 = loc("build_mlir/clone")
#loc2 = loc("scope:forward/layers.0.attention":74:0)
#loc3 = loc("titan/graph/torch_tpu/worker.py":64:0)
#loc4 = loc("_call"(#loc2))
#loc5 = loc("_run"(#loc3))
#loc6 = loc(callsite(#loc4 at #loc5))
#loc9 = loc("add/add_tensor"(#loc6))
"""
    lines = name_scopes(text).splitlines()
    assert '#loc9 = loc("forward/layers.0.attention/add_tensor")' in lines
    assert '#loc1 = loc("clone")' in lines
    assert "#loc2 = loc(unknown)" in lines
    assert lines[1:3] == text.splitlines()[1:3]


def test_stablehlo_of_another_version_is_one_line(monkeypatch):
    monkeypatch.setattr(torch_tpu, "_lower", lambda segments: [b"StableHLO_v99" for _ in segments])
    with pytest.raises(LoweringError, match="^jaxlib cannot read the StableHLO of this TorchTPU, which may be newer$"):
        torch_tpu.lower_by_torch_tpu(capture_metric(lambda x, mesh: x.sum()))
