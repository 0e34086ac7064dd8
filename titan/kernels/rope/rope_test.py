"""Every implementation of the rotation against the float64 reference, forward and backward, and on TPU compilers."""

import cmath

import jax
import pytest
import torch

from titan.kernels.rope.api import rotate_heads
from titan.kernels.rope.arg_specs import SMALL, aot_cases
from titan.kernels.rope.reference import rotate_heads_reference
from titan.kernels.tpu_compile import compile_for_tpu


def _inputs(batch, length, num_heads, head_dim, dtype):
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(batch, length, num_heads * head_dim, generator=generator).to(dtype)
    angles = torch.rand(batch, length, head_dim // 2, generator=generator) * 100
    grad = torch.randn(batch, num_heads, length, head_dim, generator=generator).to(dtype)
    return x.requires_grad_(), angles.cos(), angles.sin(), grad


@pytest.mark.parametrize(
    ("implementation", "shape"),
    # Of three heads, and of fewer elements than a lane has, in every run.
    [
        pytest.param(implementation, shape, marks=[] if shape in (SMALL[1], SMALL[3]) else pytest.mark.exhaustive)
        for implementation in ("xla", "mosaic")
        for shape in SMALL
        if implementation == "xla" or shape[3] % 128 == 0
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("adjacent_pairs", [False, True], ids=["half", "adjacent"])
def test_forward_and_gradient_equal_the_reference(implementation, shape, dtype, adjacent_pairs):
    x, cos, sin, grad = _inputs(*shape, dtype)
    out = rotate_heads(x, cos, sin, adjacent_pairs=adjacent_pairs, implementation=implementation)
    (grad_x,) = torch.autograd.grad(out, x, grad)
    exact = x.detach().double().requires_grad_()
    expected = rotate_heads_reference(exact, cos.double(), sin.double(), adjacent_pairs=adjacent_pairs)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    for got, wanted in ((out, expected), (grad_x, expected_grad)):
        assert got.dtype == dtype
        assert torch.isfinite(got).all()
        # float32: three roundings. bfloat16: the result's own rounding alone, since products and sums are float32.
        tolerance = 1e-6 if dtype == torch.float32 else 2**-8
        assert (got.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("adjacent_pairs, pairs", [(False, [(0, 2), (1, 3)]), (True, [(0, 1), (2, 3)])])
def test_the_reference_turns_each_pair_as_a_complex_number(adjacent_pairs, pairs):
    x, angles = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[[0.3, 0.7]]])
    out = rotate_heads_reference(x, angles.cos(), angles.sin(), adjacent_pairs=adjacent_pairs).flatten()
    for (first, second), angle in zip(pairs, (0.3, 0.7), strict=True):
        turned = complex(x[0, 0, first], x[0, 0, second]) * cmath.exp(1j * angle)
        assert abs(complex(out[first], out[second]) - turned) < 1e-6


def test_angles_have_no_gradient():
    x, cos, sin, grad = _inputs(1, 8, 1, 64, torch.float32)
    out = rotate_heads(x, cos.requires_grad_(), sin)
    x_grad, cos_grad = torch.autograd.grad(out, (x, cos), grad, allow_unused=True)
    assert x_grad is not None
    assert cos_grad is None


@pytest.mark.parametrize(
    ("model", "generation"),
    [
        ("Llama 3 8B", "tpu7x"),
        ("Muse Glimmer 30B", "v6e"),
        pytest.param("Llama 3 8B", "v6e", marks=pytest.mark.exhaustive),
        pytest.param("Muse Glimmer 30B", "tpu7x", marks=pytest.mark.exhaustive),
    ],
)
def test_on_tpu_the_kernel_moves_little_and_keeps_nothing(model, generation):
    case = next(case for case in aot_cases(generation) if case.name.startswith(model))
    ours, xlas = (compile_for_tpu(run, *case.args, generation=generation) for run in (case.fused, case.unfused))
    assert ours.vmem_bytes > 0
    # The cosines and sines, spread over whole heads, are all that lies in HBM besides arguments and results.
    assert ours.temp_bytes < 0.1 * case.args[0].size * 2
    assert ours.hbm_bytes < 0.6 * xlas.hbm_bytes


def test_wrong_arguments_are_one_clear_line():
    x, cos, sin, _ = _inputs(1, 8, 1, 64, torch.float32)
    with pytest.raises(ValueError, match=r"cos is torch.float32\[1, 8, 32\] and sin torch.float32\[1, 8, 16\]"):
        rotate_heads(x, cos, sin[..., :16])
    with pytest.raises(ValueError, match=r"both must be float32"):
        rotate_heads(x, cos.bfloat16(), sin.bfloat16())
    with pytest.raises(ValueError, match=r"both must be float32"):
        rotate_heads(x, cos.bfloat16(), sin)
    with pytest.raises(ValueError, match=r"asks for \[1, 8, a multiple of 64\]"):
        rotate_heads(x[..., :60], cos, sin)
    with pytest.raises(ValueError, match=r"x is \[1, 0, 64\]: it is empty"):
        rotate_heads(x[:, :0], cos[:, :0], sin[:, :0])
    with pytest.raises(NotImplementedError, match="x is torch.float16: convert it"):
        rotate_heads(x.half(), cos, sin)
    with pytest.raises(NotImplementedError, match="multiples of 128, not 64"):
        rotate_heads(x, cos, sin, implementation="mosaic")
    with pytest.raises(ValueError, match="no implementation 'fast'"):
        rotate_heads(x, cos, sin, implementation="fast")


def test_the_platform_chooses():
    x, cos, sin, _ = (jax.numpy.asarray(tensor.detach().numpy()) for tensor in _inputs(1, 16, 1, 128, torch.float32))
    from titan.kernels.rope.op import rotate_heads_op
    from titan.kernels.target import Target, lowering_for

    for platform, expected in (("cpu", False), ("tpu", True)):
        with lowering_for(Target(platform, "TPU v6 lite" if platform == "tpu" else "cpu")):
            traced = str(jax.make_jaxpr(lambda *args: rotate_heads_op.jax(*args))(x, cos, sin))
        assert ("pallas_call" in traced) == expected
