"""The op against PyTorch, the kernel against the plain activation, the pass, and the recipe as a user starts it."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import leaky.lowering  # noqa: F401  (fills the table, as the plugin has titan do)
from leaky.kernel import squared_relu
from leaky.ops import leaky_sum
from leaky.reciprocals import reciprocals
from titan.graph.capture.trace import StepFunction, capture
from titan.graph.lowering.lower import lower
from titan.graph.passes.pipeline import run_passes
from titan.kernels.target import Target
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec

CPU = Target("cpu", "cpu")


def _inputs():
    torch.manual_seed(0)
    is_start_BT = torch.zeros(2, 9, dtype=torch.bool)
    is_start_BT[:, 0] = is_start_BT[0, 4] = is_start_BT[1, 7] = True
    return torch.randn(2, 9, 3), torch.tensor([0.0, 0.5, 0.9]), is_start_BT


def test_the_lowering_computes_what_the_op_does():
    for backward in (False, True):
        x_BTE, decay_E, is_start_BT = _inputs()
        expected = leaky_sum(x_BTE, decay_E, is_start_BT, backward)
        traced = make_fx(lambda *tensors, side=backward: leaky_sum(*tensors, side))(x_BTE, decay_E, is_start_BT)
        got = lower(traced, target=CPU)(*(tensor.numpy() for tensor in (x_BTE, decay_E, is_start_BT)))
        # float32: sums of nine terms in another order
        np.testing.assert_allclose(jax.tree.leaves(got)[0], expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_the_sum_written_out():
    x_BTE, decay_E, is_start_BT = (tensor.double() if tensor.is_floating_point() else tensor for tensor in _inputs())
    assert torch.autograd.gradcheck(lambda x: leaky_sum(x, decay_E, is_start_BT), x_BTE.requires_grad_())


def test_the_kernel_computes_the_activation_and_its_gradient():
    x = torch.randn(40, 8, requires_grad=True)
    results = []
    for function in (lambda x: squared_relu(x, block_rows=16, implementation="mosaic"), lambda x: torch.relu(x) ** 2):
        out = function(x)
        results.append((out.detach(), *torch.autograd.grad(out.sin().sum(), x)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_the_pass_changes_exact_divisions_alone():
    def step(state, batch):
        return {}, {"exact": state["x"] / 4, "inexact": state["x"] / 3}

    function = StepFunction(step, torch.nn.Module())
    graph = capture(lambda mesh: function, {"x": TensorLayout((2,), torch.float32)}, {}, MeshSpec((), ()))
    changed, _ = run_passes(graph, (reciprocals,))  # which checks the result, and that `graph` is as it was
    divisions = [torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor]
    assert [node.target for node in changed.module.graph.nodes if node.target in divisions] == divisions
    x = torch.tensor([1.0, 5.0])
    assert all(torch.equal(got, wanted) for got, wanted in zip(changed.module(x), graph.module(x), strict=True))


def _train(folder: pathlib.Path, *flags: str) -> dict:
    flags = (
        "--plugins=leaky.titan_plugin",
        f"--checkpoint.folder={folder}",
        f"--data.cache_folder={folder}/data",
        *flags,
    )
    command = [sys.executable, "-m", "titan.train", "leaky_debug", *flags]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    file = folder / "text.txt"
    file.write_text("\n\n".join(f"The square of {number} is {number**2}." for number in range(3000)))
    return (
        f"--data.path={file}",
        "--tokenizer.vocab_size=300",
        f"--tokenizer.cache_folder={folder}",
        "--model.vocab_size=300",
        "--model.num_layers=1",
        "--model.dim=32",
        "--model.ffn_dim=64",
        "--training.sequence_length=64",
        "--training.steps=12",
        "--training.validation_interval=0",
        "--compile.cache_folder=",
    )


def test_the_recipe_trains_with_and_without_the_kernel(tmp_path, text):
    plain = _train(tmp_path / "plain", *text)
    assert plain["last_loss"] < plain["first_loss"] - 0.5
    kernel = _train(tmp_path / "kernel", *text, "--squared_relu_kernel", "--squared_relu_kernel.block_rows=64")
    for name in ("first_loss", "last_loss"):
        assert kernel[name] == pytest.approx(plain[name], rel=1e-5), name  # float32
