"""Loops, barriers and transfers in XLA, against PyTorch's own `scan` and against doing nothing."""

import jax
import numpy as np
import pytest
import torch
import torch.fx
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.proxy_tensor import make_fx

from titan.graph.ir.barrier import barrier
from titan.graph.ir.reversed_scans import find_reversed_scans
from titan.graph.lowering.lower import lower
from titan.graph.lowering.ops import TABLE


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    """PyTorch's scan goes through Dynamo, which takes shapes that it has seen to change for symbolic."""
    torch._dynamo.reset()


_X = torch.arange(12.0).reshape(4, 3) / 10
_INIT = torch.tensor([1.0, 2.0, 3.0])


def _turn(carry: torch.Tensor, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    following = carry * 0.5 + entry.sin()
    return following, following * entry


def _forward(init: torch.Tensor, x: torch.Tensor):
    return scan(_turn, init, x)


def _reversed(init: torch.Tensor, x: torch.Tensor):
    carry, stacked = scan(_turn, init, x.flip(0))
    return carry, stacked.flip(0)


def _flipped_input_is_a_result_too(init: torch.Tensor, x: torch.Tensor):
    flipped = x.flip(0)
    carry, stacked = scan(_turn, init, flipped)
    return carry, stacked.flip(0), flipped


def _flipped_input_goes_elsewhere(init: torch.Tensor, x: torch.Tensor):
    flipped = x.flip(0)
    carry, stacked = scan(_turn, init, flipped)
    return carry, stacked.flip(0), flipped @ flipped.t()


def _two_loops_share_a_flip(init: torch.Tensor, x: torch.Tensor):
    flipped = x.flip(0)
    first, second = scan(_turn, init, flipped), scan(_turn, init * 2, flipped)
    return first[0], first[1].flip(0), second[0], second[1].flip(0)


def _one_of_two_loops_is_reversed(init: torch.Tensor, x: torch.Tensor):
    flipped = x.flip(0)
    first, second = scan(_turn, init, flipped), scan(_turn, init, flipped)
    return first[0], first[1].flip(0), second[0], second[1]


def _result_is_read_in_both_orders(init: torch.Tensor, x: torch.Tensor):
    carry, stacked = scan(_turn, init, x.flip(0))
    return carry, stacked.flip(0), stacked


def _flipped_along_another_dim(init: torch.Tensor, x: torch.Tensor):
    carry, stacked = scan(_turn, init, x.flip(1))
    return carry, stacked.flip(1)


def _flipped_again(init: torch.Tensor, x: torch.Tensor):
    carry, stacked = scan(_turn, init, x.flip(0))
    return carry, stacked.flip(0).flip(0), scan(_turn, carry, stacked.flip(0))[1]


_LOOPS = {
    _forward: 0,
    _reversed: 1,
    _flipped_input_is_a_result_too: 0,
    _flipped_input_goes_elsewhere: 0,
    _two_loops_share_a_flip: 2,
    _one_of_two_loops_is_reversed: 0,
    _result_is_read_in_both_orders: 0,
    _flipped_along_another_dim: 0,
    _flipped_again: 1,
}


@pytest.mark.parametrize(("loop", "num_reversed"), _LOOPS.items(), ids=[loop.__name__[1:] for loop in _LOOPS])
def test_scan_computes_what_pytorchs_does(loop, num_reversed: int) -> None:
    module = make_fx(loop, tracing_mode="fake")(_INIT, _X)
    reversed_scans, flips = find_reversed_scans(module.graph)
    assert len(reversed_scans) == num_reversed
    assert bool(flips) == bool(num_reversed)
    got = jax.jit(lower(module))(_INIT.numpy(), _X.numpy())
    for array, expected in zip(got, loop(_INIT, _X), strict=True):
        np.testing.assert_allclose(array, expected.numpy(), rtol=1e-6)


def test_scan_carries_several_and_reads_what_is_shared() -> None:
    shared = torch.tensor([[1.0, -1.0, 0.5]] * 3)

    def loop(init: torch.Tensor, x: torch.Tensor, shared: torch.Tensor):
        def turn(carry, entry):
            number, vector = carry
            return (number + 1, (vector @ shared).tanh()), (vector.clone(), entry[0] * number, entry[1].sum())

        carry, stacked = scan(turn, (torch.zeros((), dtype=torch.int32), init), (x, x.t().reshape(4, 3)))
        return (*carry, *stacked)

    module = make_fx(loop, tracing_mode="fake")(_INIT, _X, shared)
    (node,) = module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan)
    body = getattr(module, node.args[0].target).graph
    body.find_nodes(op="placeholder")[-1].meta["val"] = shared  # which PyTorch's tracing leaves out
    got = jax.jit(lower(module))(_INIT.numpy(), _X.numpy(), shared.numpy())
    assert got[0] == 4
    for array, expected in zip(got, loop(_INIT, _X, shared), strict=True):
        np.testing.assert_allclose(array, expected.numpy(), rtol=1e-6)


def test_flips_of_a_reversed_loop_are_not_in_the_program() -> None:
    for loop, count in ((_reversed, 0), (_flipped_input_goes_elsewhere, 2)):
        module = make_fx(loop, tracing_mode="fake")(_INIT, _X)
        text = jax.jit(lower(module)).lower(_INIT.numpy(), _X.numpy()).as_text()
        assert text.count("stablehlo.reverse") == count


def test_a_barrier_and_transfers_compute_nothing() -> None:
    graph = torch.fx.Graph()
    x, y = (graph.placeholder(name) for name in "xy")
    behind = graph.call_function(torch.ops.titan.barrier.default, ([x, y],))
    moved = graph.call_function(torch.ops.ao.offload.default, (y,))
    waited = graph.call_function(torch.ops.ao.wait_tensor.default, (moved,))
    back = graph.call_function(torch.ops.ao.reload.default, (waited, torch.device("cpu"), [4, 3], [1, 4]))
    there = graph.call_function(torch.ops.ao.wait_tensor.default, (back,))
    graph.output((behind, there))
    values = [_INIT, _X]
    for node, value in {x: _INIT, y: _X, behind: values, moved: _X, waited: _X, back: _X, there: _X}.items():
        node.meta["val"] = value
    program = jax.jit(lower(torch.fx.GraphModule(torch.nn.Module(), graph)))
    (first, second), third = program(_INIT.numpy(), _X.numpy())
    for array, expected in ((first, _INIT), (second, _X), (third, _X)):
        np.testing.assert_array_equal(array, expected.numpy())
    text = program.lower(_INIT.numpy(), _X.numpy()).as_text()
    assert text.count("stablehlo.optimization_barrier") == 1
    eager = barrier(values)
    assert all(torch.equal(one, other) and one is not other for one, other in zip(eager, values, strict=True))


def test_every_op_that_only_orders_and_moves_is_tested_here() -> None:
    tested = {"higher_order.scan.default", "titan.barrier.default"}
    tested |= {f"ao.{name}.default" for name in ("offload", "reload", "wait_tensor")}
    # In collectives_test.
    elsewhere = {f"titan.{name}.default" for name in ("all_gather_along", "axis_index", "reduce_scatter_along")}
    assert {name for name in TABLE if name.startswith(("higher_order.", "titan.", "ao."))} == tested | elsewhere
