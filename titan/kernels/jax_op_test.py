"""jax_op: schemas, gradients, shapes for fake tensors, the choice of implementation, and refusals in one clear line."""

import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from titan.kernels.jax_op import OPS, jax_op
from titan.kernels.target import Target, current_target, lowering_for


class Gradients(NamedTuple):
    x: jax.Array
    w: jax.Array


class Result(NamedTuple):
    out: jax.Array
    row_sum: jax.Array


def _product_kernel(x_ref, w_ref, out_ref):
    out_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)


def _pallas_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return pl.pallas_call(_product_kernel, out_shape=jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype))(x, w)


@jax_op("titan_test::matmul_backward", backward=None)
def matmul_backward(x: jax.Array, w: jax.Array, grad_out: jax.Array, *, factor: float) -> Gradients:
    return Gradients(grad_out @ w.T * factor, x.T @ grad_out * factor)


@matmul_backward.implementation("mosaic", platforms=("tpu",), pallas=True)
def _matmul_backward_mosaic(x: jax.Array, w: jax.Array, grad_out: jax.Array, *, factor: float) -> Gradients:
    return Gradients(_pallas_product(grad_out, w.T) * factor, _pallas_product(x.T, grad_out) * factor)


@jax_op("titan_test::matmul", backward=matmul_backward)
def matmul(x: jax.Array, w: jax.Array, ids: jax.Array | None = None, *, factor: float = 2.0) -> Result:
    """A product, scaled, and the row sums of x, which have no gradient."""
    out = x @ w * factor
    return Result(out if ids is None else out + ids[:, None], jnp.sum(x, 1))


@matmul.implementation("mosaic", platforms=("tpu",), pallas=True)
def _matmul_mosaic(x: jax.Array, w: jax.Array, ids: jax.Array | None = None, *, factor: float) -> Result:
    out = _pallas_product(x, w) * factor
    return Result(out if ids is None else out + ids[:, None], jnp.sum(x, 1))


@jax_op("titan_test::sine_power")
def sine_power(x: jax.Array, bias: jax.Array | None = None, *, power: int = 3) -> jax.Array:
    return jnp.sin(x) ** power + (0.0 if bias is None else bias)


@jax_op("titan_test::pick", differentiable=("table",))
def pick(table: jax.Array, index: jax.Array) -> jax.Array:
    return table[index]


class Halves(NamedTuple):
    low: jax.Array
    high: jax.Array


@jax_op("titan_test::halves")
def halves(x: jax.Array) -> Halves:
    return Halves(x[: x.shape[0] // 2] * 2, x[x.shape[0] // 2 :] * 3)


@jax_op("titan_test::where_am_i", backward=None)
def where_am_i(x: jax.Array) -> jax.Array:
    return x + {"cpu": 1.0, "tpu": 2.0}[current_target().platform]


@jax_op("titan_test::total", backward=None)
def total(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, x.shape[0], lambda i, so_far: so_far + x[i], jnp.zeros(()))


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator, dtype=dtype) for shape in ((6, 4), (4, 5)))
    return x.requires_grad_(), w.requires_grad_()


def _reference(x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x @ w * 2.0 + ids[:, None]


def test_the_schema_comes_from_the_annotations():
    assert str(torch.ops.titan_test.matmul.default._schema) == (
        'titan_test::matmul(Tensor x, Tensor w, Tensor? ids=None, *, float factor=2., str implementation="auto") '
        "-> (Tensor, Tensor)"
    )
    assert OPS["titan_test::matmul"] is matmul


@pytest.mark.parametrize("implementation", ["auto", "xla", "mosaic"])
def test_forward_and_gradients_equal_pytorchs(implementation):
    x, w = _inputs()
    ids = torch.arange(6)  # int64, which JAX takes as int32
    weights = torch.arange(5.0)
    result = matmul(x, w, ids, implementation=implementation)
    assert not result.row_sum.requires_grad
    torch.testing.assert_close(result.row_sum, x.detach().sum(1))
    torch.testing.assert_close(result.out, _reference(x, w, ids))
    grads = torch.autograd.grad((result.out * weights).sum(), (x, w))
    expected = torch.autograd.grad((_reference(x, w, ids) * weights).sum(), (x, w))
    torch.testing.assert_close(grads, expected)


def test_pytorchs_own_checks_of_a_custom_op():
    x, w = _inputs()
    torch.library.opcheck(torch.ops.titan_test.matmul.default, (x, w, torch.arange(6)))
    torch.library.opcheck(torch.ops.titan_test.sine_power.default, (x,), {"power": 2})


def test_a_derived_gradient_equals_pytorchs():
    x, _ = _inputs()
    (grad,) = torch.autograd.grad(sine_power(x, power=2).sum(), x)
    torch.testing.assert_close(grad, 2 * torch.sin(x) * torch.cos(x))
    table = torch.randn(5, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(pick(table, torch.tensor([1, 1, 4])).sum(), table)
    torch.testing.assert_close(grad, torch.tensor([0.0, 2, 0, 0, 1])[:, None].expand(5, 2))


def test_results_that_the_loss_does_not_use_have_gradients_of_zero():
    x = torch.randn(4, requires_grad=True)
    (grad,) = torch.autograd.grad(halves(x).high.sum(), x)
    torch.testing.assert_close(grad, torch.tensor([0.0, 0.0, 3.0, 3.0]))


def test_views_bfloat16_and_empty_tensors_go_in_and_out():
    x = torch.randn(4, 6, dtype=torch.bfloat16).t()
    out = sine_power(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, torch.sin(x) ** 3, rtol=2e-2, atol=1e-2)  # JAX rounds after each of three ops
    assert sine_power(torch.zeros(0, 3)).shape == (0, 3)


def test_no_copy_of_an_aligned_tensor_and_none_of_the_result():
    from titan.kernels.arrays import to_array, to_tensor

    x = torch.empty(1024, 1024)
    array = to_array(x)
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    assert to_tensor(array).data_ptr() == x.data_ptr()


def test_a_program_in_64_bit_mode_may_use_an_op():
    with jax.enable_x64(True):
        out = total(torch.ones(3))
        with FakeTensorMode():
            assert total(torch.ones(3)).dtype == torch.float32
        inlined = jax.jit(lambda x: total.jax(x.astype(jnp.float32)) + jnp.zeros(()))(jnp.ones(3))
    assert (out.item(), out.dtype) == (3.0, torch.float32)
    assert (inlined.item(), inlined.dtype) == (3.0, jnp.float64)


def test_it_is_captured_as_one_op_with_its_gradient():
    def step(x, w, grad):
        result = matmul(x, w)
        return torch.autograd.grad(result.out, (x, w), grad)

    with FakeTensorMode():
        x, w, grad = torch.empty(6, 4, requires_grad=True), torch.empty(4, 5, requires_grad=True), torch.empty(6, 5)
        graph = make_fx(step)(x, w, grad).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function" and "titan" in str(node.target)]
    assert targets == ["titan_test.matmul.default", "titan_test.matmul_backward.default"]


def test_the_target_chooses_the_implementation_and_the_log_says_which(caplog):
    x, w = (jnp.ones((8, 128)), jnp.ones((128, 128)))
    assert current_target().platform == "cpu"
    assert "pallas_call" not in str(jax.make_jaxpr(lambda *a: matmul.jax(*a))(x, w))
    with lowering_for(Target("tpu", "TPU v6 lite")), caplog.at_level(logging.INFO):
        assert current_target().generation == "v6e"
        assert "pallas_call" in str(jax.make_jaxpr(lambda *a: matmul.jax(*a))(x, w))
        assert "pallas_call" not in str(jax.make_jaxpr(lambda *a: matmul.jax(*a, implementation="xla"))(x, w))
    assert "titan_test::matmul: mosaic on tpu" in caplog.messages
    assert Target("tpu", "TPU v7x").generation == Target("tpu", "TPU7x").generation == "tpu7x"
    assert where_am_i(torch.zeros(1)).item() == 1.0


def test_what_a_user_may_get_wrong_is_one_clear_line():
    x, w = _inputs()
    with pytest.raises(
        ValueError, match="titan_test::sine_power has no implementation 'mosiac': choose among auto, xla"
    ):
        sine_power(x, implementation="mosiac")
    with pytest.raises(TypeError, match="titan_test::sine_power: x: a kernel takes no torch.float64 tensor"):
        sine_power(x.double())
    with pytest.raises(TypeError, match="titan_test::sine_power: x is None: give a tensor"):
        sine_power(None)
    with pytest.raises(NotImplementedError, match="titan_test::sine_power has no vmap rule"):
        torch.func.vmap(lambda x: sine_power(x, power=2))(x)
    with pytest.raises(NotImplementedError, match="titan_test::sine_power has no forward-mode derivative"):
        torch.func.jvp(sine_power, (x.detach(),), (torch.ones_like(x),))
    with pytest.raises(ValueError, match="titan_test::matmul: its tensors lie on cpu and meta: move them to one"):
        matmul(x, w.to("meta"))
    with pytest.raises(TypeError, match=r"index is int32 and has no gradient.*differentiable"):
        derived = jax_op("titan_test::pick_all")(_pick_all)
        derived(w, torch.tensor([0])).sum().backward()


def _pick_all(table: jax.Array, index: jax.Array) -> jax.Array:
    return table[index]


def test_what_an_author_may_get_wrong_is_one_clear_line():
    def unannotated(x): ...

    def bare_attribute(x: jax.Array, *, mode: object) -> jax.Array: ...

    def no_result(x: jax.Array): ...

    def fine(x: jax.Array, *, power: int = 2) -> jax.Array:
        return x

    def own_implementation(x: jax.Array, *, implementation: str) -> jax.Array:
        return x

    with pytest.raises(TypeError, match="parameter x is positional and so a tensor"):
        jax_op("titan_test::unannotated")(unannotated)
    with pytest.raises(TypeError, match="parameter mode is keyword-only and so a static attribute"):
        jax_op("titan_test::bare_attribute")(bare_attribute)
    with pytest.raises(TypeError, match="its result must be annotated"):
        jax_op("titan_test::no_result")(no_result)
    with pytest.raises(ValueError, match="titan_test::sine_power is registered already"):
        jax_op("titan_test::sine_power")(fine)
    with pytest.raises(ValueError, match="'sine_power' cannot name an op: give namespace::name"):
        jax_op("sine_power")(fine)
    with pytest.raises(ValueError, match="titan_test::own: every op has an attribute implementation of its own"):
        jax_op("titan_test::own", backward=None)(own_implementation)
    with pytest.raises(ValueError, match="titan_test::biased: differentiable names 'bias', which may be None"):
        jax_op("titan_test::biased", differentiable=("x", "bias"))(sine_power.choose("xla", "cpu").function)
    with pytest.raises(ValueError, match="'w' is neither an input nor a result of the forward"):
        jax_op("titan_test::wrong_backward", backward=matmul_backward)(fine)
    with pytest.raises(ValueError, match="give titan_test::sine_power_backward an implementation 'fast' first"):
        sine_power.implementation("fast")(sine_power.choose("xla", "cpu").function)
    with pytest.raises(ValueError, match="has an implementation 'mosaic' already"):
        matmul.implementation("mosaic")(_matmul_mosaic)
    with pytest.raises(TypeError, match="implementation 'other' does not have the op's signature"):
        where_am_i.implementation("other")(fine)
