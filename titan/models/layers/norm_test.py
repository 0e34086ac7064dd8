"""RMSNorm and Linear: precision and dtypes."""

import torch

from titan.core.init import Normal, Ones, Zeros
from titan.models.layers.linear import LinearConfig
from titan.models.layers.norm import RMSNormConfig, UnscaledRMSNormConfig


def test_norm_computes_in_float32_and_rounds_once():
    norm = RMSNormConfig(dim=64, eps=1e-5).build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(64, generator=generator) + 0.5)
    x = torch.randn(5, 64, generator=generator) * 30
    expected = torch.nn.functional.rms_norm(x.double(), (64,), norm.weight.double(), 1e-5)
    torch.testing.assert_close(norm(x), expected.float(), rtol=1e-6, atol=0)
    x_bf16 = x.bfloat16()
    assert norm(x_bf16).dtype == torch.bfloat16
    assert torch.equal(norm(x_bf16), norm(x_bf16.float()).bfloat16())
    assert norm.param_init == {"weight": Ones()}


def test_a_centre_is_added_to_the_weight_in_float32_and_unscaled_has_neither():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 64, generator=generator), torch.randn(64, generator=generator) * 1e-3
    norm = RMSNormConfig(dim=64, eps=1e-5, weight_init=Zeros(), centre=1.0).build()
    with torch.no_grad():
        norm.weight.copy_(weight)
    expected = torch.nn.functional.rms_norm(x.double(), (64,), eps=1e-5)
    torch.testing.assert_close(norm(x), (expected * (weight.double() + 1)).float(), rtol=1e-6, atol=0)
    norm.to(torch.bfloat16)  # in which 1.001 would be 1
    torch.testing.assert_close(norm(x), (expected * (weight.bfloat16().double() + 1)).float(), rtol=1e-6, atol=0)
    assert norm.param_init == {"weight": Zeros()}
    unscaled = UnscaledRMSNormConfig(eps=1e-5).build()
    torch.testing.assert_close(unscaled(x), expected.float(), rtol=1e-6, atol=0)
    assert torch.equal(unscaled(x.bfloat16()), unscaled(x.bfloat16().float()).bfloat16())
    assert not list(unscaled.parameters())


def test_linear_computes_in_the_weights_dtype():
    linear = LinearConfig(in_dim=32, out_dim=8, weight_init=Normal(1.0)).build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(8, 32, generator=generator))
    x = torch.randn(2, 3, 32, generator=generator)
    torch.testing.assert_close(linear(x), x @ linear.weight.T)
    expected = x.bfloat16() @ linear.weight.bfloat16().T
    linear.to(torch.bfloat16)
    assert torch.equal(linear(x), expected) and expected.dtype == torch.bfloat16
    assert linear.param_init == {"weight": Normal(1.0)}
