"""The SPMD check: ranks baked into a graph and reductions left out are refused; axis_index and reduced values pass."""

import inspect

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan.graph.capture.scan_layers import scan_layers
from titan.graph.capture.spmd_check import SpmdError, check_spmd
from titan.graph.capture.trace import StepFunction, capture
from titan.graph.testing.steps import HSDP, all_reduce, capture_metric, capture_training
from titan.parallel.axis_index import axis_index
from titan.parallel.layout import TensorLayout

_LAST = HSDP.num_devices - 1


def _check(function) -> None:
    check_spmd(*(capture_metric(function, HSDP, rank=rank) for rank in (0, _LAST)))


def _sum(x: torch.Tensor, mesh) -> torch.Tensor:
    for axis in HSDP.axis_names:
        x = all_reduce(x, mesh, axis)
    return x


def _shard(x: torch.Tensor, mesh) -> torch.Tensor:
    replicated = DTensor.from_local(x, mesh, [Replicate(), Replicate()], run_check=False)
    return replicated.redistribute(placements=[Replicate(), Shard(0)]).to_local()


def _select(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, index.reshape(1))


@pytest.mark.parametrize(
    ("baked", "message"),
    [
        (lambda x, mesh: _sum(_shard(x, mesh), mesh), "rank-dependent program"),
        (lambda x, mesh: _sum(x * mesh.get_local_rank("dp_shard"), mesh), "arguments arg0_1, 0 .* and arg0_1, 3 "),
        (lambda x, mesh: _sum(x * torch.tensor(mesh.get_local_rank("dp_shard")), mesh), "rank-dependent constant"),
        (lambda x, mesh: _sum(x[mesh.get_local_rank("dp_shard") :][:1], mesh), "slice.Tensor.* arguments arg0_1, 0, 0"),
        (lambda x, mesh: _sum(x[: 1 + mesh.get_local_rank("dp_shard")], mesh), "program: .*slice.Tensor"),
        (lambda x, mesh: _sum(x if mesh.get_local_rank("dp_replicate") else x.sin(), mesh), "rank-dependent program"),
        (lambda x, mesh: _sum(x * (-0.0 if mesh.get_rank() else 0.0), mesh), "arguments arg0_1, 0.0 .* arg0_1, -0.0"),
        (lambda x, mesh: _sum(x * (1 if mesh.get_rank() else 1.0), mesh), "arguments arg0_1, 1.0 .* and arg0_1, 1 "),
        (lambda x, mesh: _sum(x, mesh) if mesh.get_rank() else _sum(x, mesh).cos(), "rank-dependent program"),
    ],
)
def test_a_rank_baked_into_the_graph_is_refused(baked, message: str) -> None:
    with pytest.raises(SpmdError, match=message) as error:
        _check(baked)
    if "program" not in message or "slice" in message:
        assert f"in module inner at {__file__}:{inspect.getsourcelines(baked)[1]}" in str(error.value)
        assert "titan::axis_index" in str(error.value)


@pytest.mark.parametrize(
    "written",
    [
        lambda x, mesh: _sum(x * axis_index(mesh, "dp_shard"), mesh),
        lambda x, mesh: _sum(x + axis_index(mesh, "dp_shard").to(torch.float32), mesh),
        lambda x, mesh: _sum(_select(x, axis_index(mesh, "dp_shard")), mesh),
        lambda x, mesh: _sum(x.masked_fill(x > 0, float("nan")) * torch.tensor(float("nan")), mesh),
        lambda x, mesh: x * torch.tensor([0.0, -0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) + torch.tensor([True]),
    ],
)
def test_the_same_for_all_ranks_passes(written) -> None:
    _check(written)


def test_a_rank_in_the_body_of_a_loop_is_refused() -> None:
    def loop(x: torch.Tensor, mesh) -> torch.Tensor:
        rank = mesh.get_local_rank("dp_shard")
        return scan(lambda c, w: (c * w + rank, c.sum()), x, x.view(8, 8, 1))[0]

    with pytest.raises(SpmdError, match="arguments mul, 0 .* and mul, 3 "):
        _check(loop)


def _check_training_in_a_loop(axes: tuple[str, ...]) -> None:
    """Holds a step that trains a replicated scale of each of three layers, whose gradient is summed over `axes`."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, mesh):
            ctx.mesh = mesh
            return weight.clone()

        @staticmethod
        def backward(ctx, grad):
            for axis in axes:
                grad = all_reduce(grad, ctx.mesh, axis)
            return grad, None

    def make_step(mesh) -> StepFunction:
        def call(state, batch):
            weight = state["w"].detach().requires_grad_()
            (y,) = scan_layers(
                lambda carry, weights, _: ((carry[0] * Scale.apply(weights["w"], mesh)).tanh(),),
                (batch["x"],),
                {"w": weight},
                (),
            )
            return {"w": state["w"] - torch.autograd.grad(y.sum(), weight)[0]}, {}

        return StepFunction(call, nn.Module())

    weights = TensorLayout((3, 8), torch.float32, (Replicate(), Replicate()))
    rows = TensorLayout((16, 8), torch.float32, (Shard(0), Shard(0)))
    check_spmd(*(capture(make_step, {"w": weights}, {"x": rows}, HSDP, rank=rank) for rank in (0, _LAST)))


def test_a_gradient_that_is_summed_in_a_loop_passes_and_one_that_is_not_is_refused() -> None:
    _check_training_in_a_loop(HSDP.axis_names)
    for axis, other in (HSDP.axis_names, reversed(HSDP.axis_names)):
        with pytest.raises(SpmdError, match=f"w is to be equal along mesh axis {axis} and may differ: node sub"):
            _check_training_in_a_loop((other,))


def test_what_comes_around_a_loop_is_followed() -> None:
    def loop(x: torch.Tensor, mesh, *, equalise: bool) -> torch.Tensor:
        def turn(carry, weights, _):
            # What differs between ranks reaches the first value in the third turn.
            first, second, third = carry
            first = first + second
            if equalise:
                first = all_reduce(first, mesh, "dp_shard")
            return first, second + third, third * axis_index(mesh, "dp_shard")

        return scan_layers(turn, (x, x, x), {"w": x}, ())[0]

    with pytest.raises(SpmdError, match="metric is to be equal along mesh axis dp_shard and may differ"):
        _check(lambda x, mesh: loop(x, mesh, equalise=False))
    _check(lambda x, mesh: loop(x, mesh, equalise=True))


def test_what_differs_before_a_loop_that_makes_it_equal_passes() -> None:
    def loop(x: torch.Tensor, mesh) -> torch.Tensor:
        def turn(carry, weights, _):
            return (all_reduce(carry[0], mesh, "dp_shard"),)

        return scan_layers(turn, (x * axis_index(mesh, "dp_shard"),), {"w": x}, ())[0]

    _check(loop)


def test_a_training_step_passes() -> None:
    check_spmd(capture_training(HSDP), capture_training(HSDP, rank=_LAST))


@pytest.mark.parametrize(
    ("axes", "missing"), [((), "dp_replicate"), (("dp_shard",), "dp_replicate"), (("dp_replicate",), "dp_shard")]
)
def test_a_reduction_left_out_is_refused(axes: tuple[str, ...], missing: str) -> None:
    weight = TensorLayout((8,), torch.float32, (Replicate(), Replicate()))
    rows = TensorLayout((8, 8), torch.float32, (Shard(0), Shard(0)))

    def make_step(mesh) -> StepFunction:
        def call(state, batch):
            grad = batch["x"].sum(0)
            for axis in axes:
                grad = all_reduce(grad, mesh, axis)
            return {"w": state["w"] - grad}, {}

        return StepFunction(call, nn.Module())

    graphs = [capture(make_step, {"w": weight}, {"x": rows}, HSDP, rank=rank) for rank in (0, _LAST)]
    with pytest.raises(SpmdError, match=f"w is to be equal along mesh axis {missing} and may differ: node sub"):
        check_spmd(*graphs)


def _scatter(x: torch.Tensor, mesh) -> torch.Tensor:
    group = mesh.get_group("dp_shard").group_name
    return torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", 4, group)


@pytest.mark.parametrize("source", [lambda x, mesh: axis_index(mesh, "dp_shard"), _scatter], ids=["index", "scatter"])
def test_what_depends_on_the_rank_is_followed_to_the_metrics(source) -> None:
    with pytest.raises(SpmdError, match="metric is to be equal along mesh axis dp_shard and may differ: node sum_1"):
        _check(lambda x, mesh: source(x, mesh).sum())
    _check(lambda x, mesh: all_reduce(source(x, mesh).sum(), mesh, "dp_shard"))


def test_a_shard_may_differ_along_its_own_axis_alone() -> None:
    rows = TensorLayout((32, 8), torch.float32, (Shard(0), Shard(0)))

    def graphs(layout: TensorLayout):
        def make_step(mesh) -> StepFunction:
            def call(state, batch):
                return {"w": state["w"] + all_reduce(_scatter(batch["x"], mesh), mesh, "dp_replicate")}, {}

            return StepFunction(call, nn.Module())

        return [capture(make_step, {"w": layout}, {"x": rows}, HSDP, rank=rank) for rank in (0, _LAST)]

    check_spmd(*graphs(TensorLayout((4, 8), torch.float32, (Replicate(), Shard(0)))))
    with pytest.raises(SpmdError, match="w is to be equal along mesh axis dp_shard"):
        check_spmd(*graphs(TensorLayout((1, 8), torch.float32, (Replicate(), Replicate()))))
