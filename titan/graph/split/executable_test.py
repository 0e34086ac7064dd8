"""A step in pieces against the same step interpreted whole by PyTorch, in the corners of what a step may hold."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

from titan.graph.capture.scan_layers import scan_layers
from titan.graph.capture.trace import StepFunction, Tensors, capture
from titan.graph.executors.torch import TorchExecutable
from titan.graph.executors.xla import abstract_arrays
from titan.graph.ir.region import region
from titan.graph.ir.step_graph import StepGraph
from titan.graph.split.executable import compile_split
from titan.graph.split.pieces import Loop, Straight, split_step
from titan.graph.testing.steps import ONE, capture_training
from titan.parallel.layout import TensorLayout

NUM_TURNS = 3
TOLERANCE = 1e-5  # of the largest value: float32 sums in another order


def layout(*shape: int) -> TensorLayout:
    return TensorLayout(shape, torch.float32)


STATE = {"w": layout(NUM_TURNS, 8, 8), "bias": layout(8), "frozen": layout(8)}
BATCH = {"x": layout(4, 8)}


def turn(carry, weights, shared):
    x, total = carry
    y = torch.tanh(x @ weights["w"] + shared[0])
    return y, total + y.sum()


def step(state: Tensors, batch: Tensors) -> tuple[Tensors, Tensors]:
    """The first loop begins with an input, the second with what is read later too; the stack and what is shared are the
    same for both, and one value begins as the same constant in both."""
    x, zero = batch["x"], torch.zeros(())
    w, bias = (state[name].detach().requires_grad_() for name in ("w", "bias"))
    y, total = scan_layers(turn, (x, zero), {"w": w}, (bias,))
    z, other_total = scan_layers(turn, (y, zero), {"w": w}, (bias,))
    with region("loss"):
        loss = (z - x).square().sum() + (y * state["frozen"]).sum() + 0.1 * (total - other_total)
    of_w, of_bias = torch.autograd.grad(loss, [w, bias])
    with region("optimizer"):
        new = {"w": state["w"] - 0.1 * of_w, "bias": state["bias"] - 0.1 * of_bias, "frozen": state["frozen"].clone()}
    return new, {"loss": loss.detach(), "again": loss.detach().clone()}


def captured() -> StepGraph:
    return capture(lambda mesh: StepFunction(step, nn.Module()), STATE, BATCH, ONE)


def without_loops() -> StepGraph:
    return capture_training(ONE)


@pytest.mark.parametrize("make", [captured, without_loops])
def test_pieces_give_what_the_whole_gives(make):
    graph = make()
    executable, reference = compile_split(graph, jax.devices()), TorchExecutable(graph, lambda: None)
    random = np.random.default_rng(0)
    values = {
        name: random.normal(size=layout.shape, scale=0.3).astype(np.float32)
        for name, layout in {**graph.state, **graph.batch}.items()
    }
    abstract = abstract_arrays(graph.state, ONE, executable.mesh)
    batch = executable.place({name: values[name] for name in graph.batch})
    expected_state = {name: torch.from_numpy(values[name].copy()) for name in graph.state}
    expected_batch = {name: torch.from_numpy(values[name]) for name in graph.batch}
    for _ in range(2):
        before = {
            name: jax.device_put(value.numpy().copy(), abstract[name].sharding)
            for name, value in expected_state.items()
        }
        state, metrics = executable(before, batch)
        expected_state, expected = reference(expected_state, expected_batch)
        for name, value in {**expected_state, **expected}.items():
            got, value = np.asarray({**state, **metrics}[name]), value.numpy()
            assert np.abs(got - value).max() <= TOLERANCE * np.abs(value).max(), name
        assert all(array.is_deleted() for array in before.values())  # its memory is the new state's
        assert not any(array.is_deleted() for array in batch.values())


def test_pieces_of_a_step():
    pieces = split_step(captured()).pieces
    assert [type(piece) for piece in pieces if isinstance(piece, Loop)] == [Loop] * 4
    assert [piece.is_reversed for piece in pieces if isinstance(piece, Loop)] == [False, False, True, True]
    assert all(piece.num_turns == NUM_TURNS for piece in pieces if isinstance(piece, Loop))
    forward, backward = pieces_of(pieces, False)[0], pieces_of(pieces, True)[-1]
    # What a turn is given is kept one by one and never stacked; gradients of the weights are stacked.
    assert set(forward.zeros) == {None} and set(forward.stacked) <= set(backward.stacks)
    assert all(backward.zeros)
    carried = [name for piece in pieces if isinstance(piece, Loop) for name in piece.carry]
    read = [name for piece in pieces for name in piece.inputs]
    assert all(read.count(name) == 1 for name in carried)  # its memory is taken over: nobody else may read it
    assert isinstance(pieces[-1], Straight) and len(pieces[-1].outputs) == len(STATE) + 2


def pieces_of(pieces, is_reversed: bool) -> list[Loop]:
    return [piece for piece in pieces if isinstance(piece, Loop) and piece.is_reversed == is_reversed]


def test_a_step_without_loops_is_one_piece():
    assert [type(piece) for piece in split_step(without_loops()).pieces] == [Straight]


def test_an_error_of_the_compiler_passes_through():
    def refuse(lowered):
        raise RuntimeError("the compiler says no")

    with pytest.raises(RuntimeError, match="the compiler says no"):
        compile_split(captured(), jax.devices(), compile_program=refuse)
