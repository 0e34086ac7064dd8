"""The interpreter: what it checks, how it reports, and what program it makes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from titan.graph.lowering.dtypes import array_dtype, result_dtype
from titan.graph.lowering.lower import lower
from titan.graph.lowering.table import LoweringError, lowering
from titan.kernels.jax_op import jax_op
from titan.kernels.target import Target

aten = torch.ops.aten


def _capture(function, *args: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def _node(graph_module: torch.fx.GraphModule, target: torch._ops.OpOverload) -> torch.fx.Node:
    return next(node for node in graph_module.graph.nodes if node.target is target)


def test_training_step_matches_eager_torch() -> None:
    torch.manual_seed(0)
    weight, embedding = torch.randn(16, 16) * 0.3, torch.randn(11, 16)
    tokens, labels = torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 5))
    labels[0, 1] = -100

    def step(weight, embedding, tokens, labels):
        weight, embedding = (p.detach().requires_grad_() for p in (weight, embedding))
        hidden = torch.nn.functional.embedding(tokens, embedding)
        heads = (hidden @ weight.t()).unflatten(-1, (4, 4)).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        hidden = hidden + torch.nn.functional.silu(mixed.transpose(1, 2).flatten(-2))
        logits = hidden @ embedding.t()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        gradients = torch.autograd.grad(loss, (weight, embedding))
        return loss.detach(), *(p.detach() - 0.1 * g for p, g in zip((weight, embedding), gradients, strict=True))

    args = (weight, embedding, tokens, labels)
    with jax.numpy_dtype_promotion("strict"):
        ours = jax.jit(lower(_capture(step, *args)))(
            weight.numpy(), embedding.numpy(), *(t.numpy().astype(np.int32) for t in (tokens, labels))
        )
    for array, expected in zip(ours, step(*args), strict=True):
        np.testing.assert_allclose(array, expected.numpy(), rtol=1e-5, atol=1e-5)


def test_all_missing_ops_are_listed_with_module_and_source() -> None:
    graph_module = _capture(lambda x: torch.linalg.inv_ex(torch.polygamma(1, x)), torch.eye(3))
    polygamma = _node(graph_module, aten.polygamma.default)
    polygamma.meta["module_fqn"] = "layers.0.norm"
    polygamma.meta["source"] = "/home/me/model.py:7"
    with pytest.raises(LoweringError) as error:
        lower(graph_module)
    lines = str(error.value).splitlines()
    assert any(
        "aten.polygamma.default" in line and "layers.0.norm" in line and "/home/me/model.py:7" in line for line in lines
    )
    assert any("aten.linalg_inv_ex.default" in line for line in lines)


def test_wrong_metadata_names_node_and_both_shapes() -> None:
    graph_module = _capture(lambda x: x.sin(), torch.ones(3, 4))
    _node(graph_module, aten.sin.default).meta["val"] = torch.empty(4, 3, device="meta")
    with pytest.raises(LoweringError, match=r"node sin .*float32\[3, 4\].*float32\[4, 3\]"):
        lower(graph_module)(jnp.ones((3, 4)))


def test_result_of_another_kind_is_an_error_and_not_cast() -> None:
    graph_module = _capture(lambda x: x.sin(), torch.ones(3))
    _node(graph_module, aten.sin.default).meta["val"] = torch.empty(3, dtype=torch.int64, device="meta")
    with pytest.raises(LoweringError, match=r"float32\[3\].*int32\[3\]"):
        lower(graph_module)(jnp.ones(3))


def test_arguments_are_checked_against_the_graph() -> None:
    run = lower(_capture(lambda x, y: x + y, torch.ones(3), torch.ones(3)))
    with pytest.raises(
        LoweringError, match=r"argument y.*: got int32\[2\], but the graph was captured with float32\[3\]"
    ):
        run(jnp.ones(3), jnp.ones(2, jnp.int32))
    with pytest.raises(LoweringError, match="takes 2 arrays and was called with 1"):
        run(jnp.ones(3))


def test_failing_lowering_names_the_node() -> None:
    def dropout(q):
        return aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)[0]

    with pytest.raises(LoweringError, match="node _scaled_dot_product.*dropout 0.5"):
        lower(_capture(dropout, torch.ones(1, 1, 4, 4)))(jnp.ones((1, 1, 4, 4)))


def test_constants_become_arrays_and_must_fit() -> None:
    table = torch.arange(4)
    run = lower(make_fx(lambda x: x + table)(torch.ones(4)))
    np.testing.assert_array_equal(run(jnp.ones(4))[0], [1, 2, 3, 4])
    too_large = torch.tensor([2**40])
    with pytest.raises(LoweringError, match="beyond int32"):
        lower(make_fx(lambda x: x + too_large)(torch.ones(1)))


def test_modules_are_named_scopes_of_the_program() -> None:
    graph_module = _capture(lambda x: x.sin(), torch.ones(3))
    _node(graph_module, aten.sin.default).meta["module_fqn"] = "layers.3.feed_forward"
    text = jax.jit(lower(graph_module)).lower(jnp.ones(3)).as_text(debug_info=True)
    assert "layers.3.feed_forward" in text


def test_linear_layer_is_one_dot_without_float_conversions() -> None:
    graph_module = _capture(torch.nn.functional.linear, torch.ones(4, 8), torch.ones(6, 8))
    text = jax.jit(lower(graph_module)).lower(jnp.ones((4, 8)), jnp.ones((6, 8))).compile().as_text()
    assert "f64" not in text and " convert(" not in text
    assert text.count(" dot(") + text.count("custom-call") == 1


def test_attention_backward_shares_the_forwards_probabilities() -> None:
    def attention(q, k, v, grad):
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, logsumexp, 0.0, True)

    arrays = [jax.random.normal(jax.random.key(i), (2, 2, 8, 4)) for i in range(4)]
    graph_module = _capture(attention, *(torch.ones(2, 2, 8, 4) for _ in arrays))
    text = jax.jit(lower(graph_module)).lower(*arrays).compile().as_text()
    # Scores and output forward; value, probabilities, query and key backward. A seventh would be the scores once more.
    assert text.count(" dot(") == 6


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ((torch.ones(2, dtype=torch.bfloat16), torch.ones((), dtype=torch.float32)), torch.bfloat16),
        ((torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float32)), torch.float32),
        ((torch.ones(2, dtype=torch.int32), 2.5), torch.float32),
        ((torch.ones(2, dtype=torch.uint8), torch.ones((), dtype=torch.int32)), torch.uint8),
        ((torch.ones(2, dtype=torch.bool), 3), torch.int64),
        ((torch.ones((), dtype=torch.bfloat16), 1e-3), torch.bfloat16),
    ],
)
def test_promotion_is_torchs(operands, expected: torch.dtype) -> None:
    arrays = [
        jnp.asarray(o.float().numpy(), array_dtype(o.dtype)) if isinstance(o, torch.Tensor) else o for o in operands
    ]
    assert result_dtype(*arrays) == array_dtype(expected)


class _Split(NamedTuple):
    low: jax.Array
    high: jax.Array


@jax_op("titan_test::split", differentiable=("x",))
def _split(x: jax.Array, *, sizes: tuple[int, ...]) -> _Split:
    return _Split(x[: sizes[0]] * 2, x[sizes[0] :])


@_split.backward.implementation("times_four", platforms=("tpu",))
def _split_backward(
    x: jax.Array, grad_low: jax.Array, grad_high: jax.Array, *, sizes: tuple[int, ...]
) -> _split.backward.signature.result_type:
    return _split.backward.signature.result_type(jnp.concatenate([grad_low * 4, grad_high]))


@_split.implementation("times_four", platforms=("tpu",))
def _split_times_four(x: jax.Array, *, sizes: tuple[int, ...]) -> _Split:
    return _Split(x[: sizes[0]] * 4, x[sizes[0] :])


def test_kernels_are_inlined_forward_and_backward_and_chosen_by_the_target() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        low, high = _split(x, sizes=(2,))
        return low, high, torch.autograd.grad(low.sum() + 3 * high.sum(), x)[0]

    x = torch.arange(5.0)
    graph_module = _capture(step, x)
    assert {"titan_test.split.default", "titan_test.split_backward.default"} <= {
        str(node.target) for node in graph_module.graph.nodes
    }
    for platform, factor in (("cpu", 2.0), ("tpu", 4.0)):
        traced = jax.jit(lower(graph_module, target=Target(platform)))
        low, high, grad = traced(x.numpy())
        np.testing.assert_array_equal(low, x[:2].numpy() * factor)
        np.testing.assert_array_equal(high, x[2:].numpy())
        np.testing.assert_array_equal(grad, [factor, factor, 3, 3, 3])
        assert "callback" not in traced.lower(x.numpy()).as_text()


def test_table_rejects_duplicates_and_odd_names() -> None:
    with pytest.raises(ValueError, match="aten.add.Tensor has two lowerings"):
        lowering("aten.add.Tensor")(lambda ctx: None)
    with pytest.raises(ValueError, match="namespace.op.overload"):
        lowering("add")(lambda ctx: None)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(96, 32), (32, 96)])
def test_a_wide_weights_gradient_is_multiplied_the_quick_way_round_on_cpu(num_outputs: int, num_inputs: int) -> None:
    grad, x = torch.randn(64, num_outputs), torch.randn(64, num_inputs)
    graph_module = _capture(lambda grad, x: grad.t() @ x, grad, x)
    programs = {
        platform: jax.jit(lower(graph_module, target=Target(platform))).lower(grad.numpy(), x.numpy())
        for platform in ("cpu", "tpu")
    }
    (product,) = programs["cpu"].compile()(grad.numpy(), x.numpy())
    np.testing.assert_allclose(product, (grad.double().t() @ x.double()).numpy(), rtol=1e-5, atol=1e-4)
    assert ("optimization_barrier" in programs["cpu"].as_text()) == (num_outputs > num_inputs)
    assert "optimization_barrier" not in programs["tpu"].as_text()
