"""Softmax, normalisation layers and dropout, with their backwards. Statistics are computed in float32."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from titan.graph.lowering.aten.reduction import variance_and_mean
from titan.graph.lowering.dtypes import cast, compute_dtype
from titan.graph.lowering.table import LoweringContext, lowering


def _wide(x: jax.Array) -> jax.Array:
    return cast(x, compute_dtype(x.dtype))


@lowering("aten._softmax.default")
def _softmax(ctx: LoweringContext, self: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    return jax.nn.softmax(_wide(self), axis=dim if self.ndim else None)


@lowering("aten._log_softmax.default")
def _log_softmax(ctx: LoweringContext, self: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    return jax.nn.log_softmax(_wide(self), axis=dim if self.ndim else None)


@lowering("aten._softmax_backward_data.default")
def _softmax_backward(
    ctx: LoweringContext, grad_output: jax.Array, output: jax.Array, dim: int, input_dtype
) -> jax.Array:
    grad, y = _wide(grad_output), _wide(output)
    product = grad * y
    return product - y * jnp.sum(product, axis=dim if y.ndim else None, keepdims=True)


@lowering("aten._log_softmax_backward_data.default")
def _log_softmax_backward(
    ctx: LoweringContext, grad_output: jax.Array, output: jax.Array, dim: int, input_dtype
) -> jax.Array:
    grad, y = _wide(grad_output), _wide(output)
    return grad - jnp.exp(y) * jnp.sum(grad, axis=dim if y.ndim else None, keepdims=True)


def _trailing(x: jax.Array, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(x.ndim - len(normalized_shape), x.ndim))


@lowering("aten.native_layer_norm.default")
def _layer_norm(
    ctx: LoweringContext,
    input: jax.Array,
    normalized_shape: Sequence[int],
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x = _wide(input)
    variance, mean = variance_and_mean(x, _trailing(x, normalized_shape), correction=0)
    rstd = lax.rsqrt(variance + eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * _wide(weight)
    return (y if bias is None else y + _wide(bias)), mean, rstd


@lowering("aten.native_layer_norm_backward.default")
def _layer_norm_backward(
    ctx: LoweringContext,
    grad_out: jax.Array,
    input: jax.Array,
    normalized_shape: Sequence[int],
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    grad, rstd = _wide(grad_out), _wide(rstd)
    dims = _trailing(input, normalized_shape)
    lead = tuple(range(input.ndim - len(dims)))
    normalized = (_wide(input) - _wide(mean)) * rstd
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = grad if weight is None else grad * _wide(weight)
        grad_input = _normalized_backward(scaled, normalized, rstd, dims)
    if output_mask[1]:
        grad_weight = jnp.sum(grad * normalized, axis=lead)
    if output_mask[2]:
        grad_bias = jnp.sum(grad, axis=lead)
    return grad_input, grad_weight, grad_bias


def _normalized_backward(grad: jax.Array, normalized: jax.Array, rstd: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """Gradient through `(x - mean) * rstd` for statistics over `dims`."""
    count = np.float32(math.prod(grad.shape[d] for d in dims))
    mean_grad = jnp.sum(grad, axis=dims, keepdims=True) / count
    mean_product = jnp.sum(grad * normalized, axis=dims, keepdims=True) / count
    return (grad - mean_grad - normalized * mean_product) * rstd


def _grouped(x: jax.Array, N: int, C: int, HxW: int, group: int) -> jax.Array:
    return x.reshape(N, group, C // group, HxW)


@lowering("aten.native_group_norm.default")
def _group_norm(
    ctx: LoweringContext,
    input: jax.Array,  # (N, C, *spatial)
    weight: jax.Array | None,
    bias: jax.Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x = _grouped(_wide(input), N, C, HxW, group)
    variance, mean = variance_and_mean(x, (2, 3), correction=0)
    rstd = lax.rsqrt(variance + eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * _wide(weight).reshape(group, C // group, 1)
    y = y if bias is None else y + _wide(bias).reshape(group, C // group, 1)
    return y.reshape(input.shape), mean.reshape(N, group), rstd.reshape(N, group)


@lowering("aten.native_group_norm_backward.default")
def _group_norm_backward(
    ctx: LoweringContext,
    grad_out: jax.Array,
    input: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    grad, x = _grouped(_wide(grad_out), N, C, HxW, group), _grouped(_wide(input), N, C, HxW, group)
    rstd = _wide(rstd).reshape(N, group, 1, 1)
    normalized = (x - _wide(mean).reshape(N, group, 1, 1)) * rstd
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = grad if weight is None else grad * _wide(weight).reshape(group, C // group, 1)
        grad_input = _normalized_backward(scaled, normalized, rstd, (2, 3)).reshape(input.shape)
    if output_mask[1]:
        grad_weight = jnp.sum(grad * normalized, axis=(0, 3)).reshape(C)
    if output_mask[2]:
        grad_bias = jnp.sum(grad, axis=(0, 3)).reshape(C)
    return grad_input, grad_weight, grad_bias


@lowering("aten._native_batch_norm_legit_no_training.default")
def _batch_norm_inference(
    ctx: LoweringContext,
    input: jax.Array,  # (N, C, *spatial)
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    momentum: float,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def channel(x: jax.Array) -> jax.Array:
        return _wide(x).reshape(-1, *[1] * (input.ndim - 2))

    y = (_wide(input) - channel(running_mean)) * lax.rsqrt(channel(running_var) + eps)
    y = y if weight is None else y * channel(weight)
    y = y if bias is None else y + channel(bias)
    return y, jnp.zeros(ctx.out[1].shape, np.float32), jnp.zeros(ctx.out[2].shape, np.float32)


@lowering("aten.native_dropout_backward.default")
def _dropout_backward(ctx: LoweringContext, grad_output: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    return cast(grad_output, ctx.compute_dtype) * mask.astype(ctx.compute_dtype) * scale
