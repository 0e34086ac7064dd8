"""Capture: what becomes of a step, how its ops are labelled, and which steps are refused."""

import inspect
import resource

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.distributed.tensor import DTensor, Replicate

from titan.graph.capture.trace import StepFunction, capture
from titan.graph.ir.dialect import DialectError, graphs_of, op_name
from titan.graph.ir.region import current_region, region
from titan.graph.ir.step_graph import StepGraph
from titan.graph.testing.steps import (
    HSDP,
    ONE,
    TinyModel,
    all_reduce,
    capture_metric,
    capture_training,
    ops,
    training_layouts,
    training_step,
)
from titan.parallel import simple_fsdp
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec

aten = torch.ops.aten


@pytest.fixture(scope="module")
def single() -> StepGraph:
    return capture_training(ONE)


@pytest.fixture(scope="module")
def hsdp() -> StepGraph:
    return capture_training(HSDP)


def test_inputs_and_outputs_are_in_order_and_distinct(single) -> None:
    inputs = single.module.graph.find_nodes(op="placeholder")
    assert [node.meta["leaf"] for node in inputs] == [*single.state, *single.batch]
    assert len({id(node.meta["val"]) for node in inputs}) == len(inputs)
    outputs = single.module.graph.output_node().args[0]
    assert single.updates_state and len(outputs) == len(single.state) + 1
    for (name, layout), node in zip(single.state.items(), outputs[: len(single.state)], strict=True):
        assert tuple(node.meta["val"].shape) == layout.shape, name
    assert single.metrics == {"loss": TensorLayout((), torch.float32)}


def test_the_graph_computes_what_the_step_computes(single) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(layout.shape) for layout in (*single.state.values(), *single.batch.values())]
    state, batch = training_layouts(ONE, 8)
    new, metrics = training_step(None, state, 8).call(
        dict(zip(state, inputs[: len(state)], strict=True)), dict(zip(batch, inputs[len(state) :], strict=True))
    )
    for ours, theirs in zip(single.module(*inputs), (*new.values(), metrics["loss"]), strict=True):
        assert torch.equal(ours, theirs)


def test_inputs_have_the_shapes_of_one_ranks_shards(hsdp) -> None:
    for node in hsdp.module.graph.find_nodes(op="placeholder"):
        layout = {**hsdp.state, **hsdp.batch}[node.meta["leaf"]]
        assert tuple(node.meta["val"].shape) == layout.local_shape(HSDP)


@pytest.mark.parametrize("mesh", [ONE, HSDP], ids=str)
def test_every_op_has_its_labels(mesh: MeshSpec, request) -> None:
    graph = request.getfixturevalue("hsdp" if mesh is HSDP else "single")
    for node in ops(graph):
        assert set(node.meta) >= {"val", "region", "module_fqn", "source"}, node
        assert node.meta["region"] and node.meta["source"] and "custom" not in node.meta, node
    regions = [node.meta["region"] for node in ops(graph)]
    assert set(regions) == {"forward", "loss", "backward", "optimizer"}

    def labels(region_name: str) -> set[str]:
        return {node.meta["module_fqn"] for node in ops(graph) if node.meta["region"] == region_name}

    assert labels("forward") >= {"first", "blocks.0", "blocks.1"}
    assert labels("loss") == {"loss"}
    assert labels("backward") >= {"first", "blocks.0", "blocks.1", "loss"}
    assert labels("optimizer") == {""}


def test_a_backward_op_has_the_module_and_line_of_its_forward_op(single) -> None:
    (norm,) = [node for node in ops(single) if node.target is aten.native_layer_norm.default]
    (backward,) = [node for node in ops(single) if node.target is aten.native_layer_norm_backward.default]
    assert (norm.meta["region"], backward.meta["region"]) == ("forward", "backward")
    assert backward.meta["module_fqn"] == norm.meta["module_fqn"] == "blocks.1"
    assert backward.meta["source"] == norm.meta["source"]
    tanhs = [node for node in ops(single) if node.target is aten.tanh_backward.default]
    lines, first = inspect.getsourcelines(TinyModel.forward)
    (tanh_line,) = [number for number, line in enumerate(lines, first) if "tanh" in line]
    assert [node.meta["source"].rpartition(":")[2] for node in tanhs] == [str(tanh_line)] * 2


def test_collectives_name_axes_and_belong_to_the_module_of_their_weight(hsdp) -> None:
    found = [
        (op_name(node.target).split(".")[1], node.args[-1], node.meta["region"], node.meta["module_fqn"])
        for node in ops(hsdp)
        if op_name(node.target).startswith("_c10d") and "wait" not in node.name
    ]
    modules = ["first", "first", "blocks.0", "blocks.1", "blocks.1", "first", "first"]  # once for each read of a weight
    assert [entry for entry in found if entry[2] == "forward" and entry[0] == "all_gather_into_tensor"] == [
        ("all_gather_into_tensor", "dp_shard", "forward", module) for module in modules
    ]
    for op, axis in (("reduce_scatter_tensor", "dp_shard"), ("all_reduce", "dp_replicate")):
        entries = [entry for entry in found if entry[2] == "backward" and entry[0] == op]
        assert sorted(entry[3] for entry in entries) == sorted(modules) and {entry[1] for entry in entries} == {axis}
    sources = {
        node.meta["source"].rpartition(":")[0]
        for node in ops(hsdp)
        if "all_gather" in node.name and "wait" not in node.name
    }
    assert sources == {simple_fsdp.__file__}


def test_an_evaluation_step_has_no_new_state() -> None:
    graph = capture_metric(lambda x, _: x.sum())
    assert not graph.updates_state and list(graph.state) == ["x"] and list(graph.metrics) == ["metric"]
    assert len(graph.module.graph.output_node().args[0]) == 1


def test_one_tensor_may_be_several_outputs() -> None:
    layout = TensorLayout((2,), torch.float32)
    step = StepFunction(lambda s, b: ({"a": s["b"], "b": s["b"]}, {"m": s["a"]}), nn.Module())
    graph = capture(lambda mesh: step, {"a": layout, "b": layout}, {}, ONE)
    a, b = graph.module.graph.find_nodes(op="placeholder")
    assert graph.module.graph.output_node().args[0] == (b, b, a)


def test_a_constant_keeps_its_values_through_a_copy() -> None:
    graph = capture_metric(lambda x, _: x + torch.tensor(2.5))
    for module in (graph.module, graph.copy().module):
        assert torch.equal(module(torch.ones(8, 8))[0], torch.full((8, 8), 3.5))


def test_a_forward_hook_returns_the_roots_own_result() -> None:
    model = nn.Linear(8, 8, device="meta")
    layouts = {name: TensorLayout(tuple(w.shape), w.dtype) for name, w in model.named_parameters()}
    layouts["x"] = TensorLayout((2, 8), torch.float32)

    def call(state, batch):
        weights = {name: state[name] for name in ("weight", "bias")}
        return {}, {"y": torch.func.functional_call(model, weights, state["x"])}

    graph = capture(lambda mesh: StepFunction(call, model), layouts, {}, ONE)
    assert graph.metrics["y"].shape == (2, 8)
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (lambda s: {"s": s["s"].to(torch.bfloat16)}, r"changed s from torch.float32\[4\] to torch.bfloat16\[4\]"),
        (lambda s: {"s": s["s"][:2]}, r"changed s from torch.float32\[4\] to torch.float32\[2\]"),
        (lambda s: {"t": s["s"]}, r"changed the state's names: \['s', 't'\]"),
        (lambda s: {"s": 1.0}, "returns s as a float"),
    ],
)
def test_a_step_keeps_the_form_of_its_state(new, message: str) -> None:
    step = StepFunction(lambda s, b: (new(s), {}), nn.Module())
    with pytest.raises(ValueError, match=message):
        capture(lambda mesh: step, {"s": TensorLayout((4,), torch.float32)}, {}, ONE)


def test_metrics_are_plain_tensors() -> None:
    with pytest.raises(ValueError, match="returns metric as a DTensor"):
        capture_metric(lambda x, mesh: DTensor.from_local(x, mesh, [Replicate()] * 2, run_check=False), HSDP)
    with pytest.raises(ValueError, match="returns metric as a float"):
        capture_metric(lambda x, _: 1.0)
    outside = torch.ones(3)
    with pytest.raises(ValueError, match="returns metric as a Tensor"):
        capture_metric(lambda x, _: outside)


_OUTSIDE = torch.ones(8, 8)
_WITHOUT_VALUES = torch.empty(8, 8, device="meta")  # a weight of the model that is missing in the state


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, _: x.add_(1), "aten.add_.Tensor.*ops that write to their inputs"),
        (lambda x, _: (x * 2).mul_(3), "aten.mul_.Tensor.*ops that write to their inputs"),
        (lambda x, _: nn.functional.dropout(x), "aten.bernoulli_.float.*draws from a global generator"),
        (lambda x, _: x + torch.rand(8, 8), "aten.rand.default.*draws from a global generator"),
        (lambda x, _: torch.randn_like(x), "aten.randn_like.default.*draws from a global generator"),
        (lambda x, _: x * x.sum().item(), "aten._local_scalar_dense.default.*torch.where"),
        (lambda x, _: x.abs() if x.sum() > 0 else x, "torch.where"),
        (lambda x, _: x[x > 0].sum(), "aten.index.Tensor.*torch.where"),
        (lambda x, _: x + _OUTSIDE, r"aten.add.Tensor.*shape \[8, 8\] that the step neither takes nor computes"),
        (lambda x, _: x @ _WITHOUT_VALUES, r"aten.mm.default.*shape \[8, 8\] that the step neither takes nor computes"),
    ],
    ids=lambda value: None if callable(value) else value.partition(".*")[0],
)
def test_a_step_that_is_not_functional_is_refused(function, message: str) -> None:
    with pytest.raises(DialectError, match=message) as error:
        capture_metric(function)
    assert f"in module inner at {__file__}:{inspect.getsourcelines(function)[1]}" in str(error.value)


def test_attention_without_dropout_is_admitted() -> None:
    def attention(x: torch.Tensor, dropout: float) -> torch.Tensor:
        x = x.view(1, 2, 4, 8)
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)

    graph = capture_metric(lambda x, _: attention(x, 0.0))
    assert any("scaled_dot_product" in node.name for node in ops(graph))
    with pytest.raises(DialectError, match="draws from a global generator"):
        capture_metric(lambda x, _: attention(x, 0.5))


def test_a_collective_over_a_group_of_its_own_is_refused() -> None:
    def other_group(x: torch.Tensor, _) -> torch.Tensor:
        return torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)

    with pytest.raises(DialectError, match="all_reduce.* communicates over process group .* no axis of the mesh"):
        capture_metric(other_group, HSDP)


def test_the_body_of_a_loop_is_in_the_dialect_too() -> None:
    def loop(body):
        return lambda x, mesh: scan(lambda c, w: (body(c, w, mesh), c.sum()), x, x.view(8, 8, 1))[0]

    graph = capture_metric(loop(lambda c, w, mesh: all_reduce(c * w, mesh, "dp_shard")), HSDP)
    _, body = graphs_of(graph.copy().module)
    (node,) = body.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce.default)
    assert node.args[-1] == "dp_shard"
    with pytest.raises(DialectError, match="aten.native_dropout.*draws from a global generator"):
        capture_metric(loop(lambda c, w, mesh: nn.functional.dropout(c) * w), HSDP)


def test_the_loss_module_must_exist() -> None:
    with pytest.raises(ValueError, match="no submodule cross_entropy"):
        capture(lambda mesh: StepFunction(lambda s, b: ({}, {}), nn.Module(), "cross_entropy"), {}, {}, ONE)


def test_capture_allocates_nothing_of_the_models_size() -> None:
    """Each of the two large weights is 1 GiB, and 128 MiB a shard."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    graph = capture_training(MeshSpec(("dp_shard",), (8,)), dim=16384)
    assert graph.state["first.weight"].shape == (16384, 16384)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_regions() -> None:
    assert current_region() == "forward"
    with region("optimizer"):
        with region("loss"):
            assert current_region() == "loss"
        assert current_region() == "optimizer"
    with pytest.raises(ValueError, match="'backwards'"), region("backwards"):
        pass
    assert current_region() == "forward"
