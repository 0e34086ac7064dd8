"""Activation functions and their backwards, computed in float32 where the tensors are narrower floats."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from titan.graph.lowering.dtypes import Scalar, cast
from titan.graph.lowering.table import LoweringContext, lowering


@lowering("aten.silu.default")
def _silu(ctx: LoweringContext, self: jax.Array) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    return x * jax.nn.sigmoid(x)


@lowering("aten.silu_backward.default")
def _silu_backward(ctx: LoweringContext, grad_output: jax.Array, self: jax.Array) -> jax.Array:
    grad, x = cast(grad_output, ctx.compute_dtype), cast(self, ctx.compute_dtype)
    sigmoid = jax.nn.sigmoid(x)
    return grad * sigmoid * (1.0 + x * (1.0 - sigmoid))


@lowering("aten.sigmoid_backward.default")
def _sigmoid_backward(ctx: LoweringContext, grad_output: jax.Array, output: jax.Array) -> jax.Array:
    grad, y = cast(grad_output, ctx.compute_dtype), cast(output, ctx.compute_dtype)
    return grad * (1.0 - y) * y


@lowering("aten.tanh_backward.default")
def _tanh_backward(ctx: LoweringContext, grad_output: jax.Array, output: jax.Array) -> jax.Array:
    grad, y = cast(grad_output, ctx.compute_dtype), cast(output, ctx.compute_dtype)
    return grad * (1.0 - y * y)


@lowering("aten.gelu.default")
def _gelu(ctx: LoweringContext, self: jax.Array, *, approximate: str = "none") -> jax.Array:
    return jax.nn.gelu(cast(self, ctx.compute_dtype), approximate=approximate == "tanh")


@lowering("aten.gelu_backward.default")
def _gelu_backward(
    ctx: LoweringContext, grad_output: jax.Array, self: jax.Array, *, approximate: str = "none"
) -> jax.Array:
    grad, x = cast(grad_output, ctx.compute_dtype), cast(self, ctx.compute_dtype)
    if approximate == "tanh":
        scale = math.sqrt(2 / math.pi)
        tanh = jnp.tanh(scale * (x + 0.044715 * x * x * x))
        slope = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * scale * (1.0 + 3 * 0.044715 * x * x)
    else:
        cdf = 0.5 * (1.0 + lax.erf(x * math.sqrt(0.5)))
        slope = cdf + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad * slope


@lowering("aten.relu.default")
def _relu(ctx: LoweringContext, self: jax.Array) -> jax.Array:
    return jnp.maximum(self, self.dtype.type(0))


@lowering("aten.threshold_backward.default")
def _threshold_backward(ctx: LoweringContext, grad_output: jax.Array, self: jax.Array, threshold: Scalar) -> jax.Array:
    return jnp.where(self <= cast(threshold, self.dtype), grad_output.dtype.type(0), grad_output)


@lowering("aten.threshold.default")
def _threshold(ctx: LoweringContext, self: jax.Array, threshold: Scalar, value: Scalar) -> jax.Array:
    return jnp.where(self <= cast(threshold, self.dtype), cast(value, self.dtype), self)


@lowering("aten.leaky_relu.default")
def _leaky_relu(ctx: LoweringContext, self: jax.Array, negative_slope: Scalar = 0.01) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    return jnp.where(x > 0, x, x * negative_slope)


@lowering("aten.leaky_relu_backward.default")
def _leaky_relu_backward(
    ctx: LoweringContext, grad_output: jax.Array, self: jax.Array, negative_slope: Scalar, self_is_result: bool
) -> jax.Array:
    # A result has the sign of its input (the slope is not negative when torch passes the result), so both cases read
    # alike.
    grad, x = cast(grad_output, ctx.compute_dtype), cast(self, ctx.compute_dtype)
    return jnp.where(x > 0, grad, grad * negative_slope)


@lowering("aten.elu.default")
def _elu(
    ctx: LoweringContext, self: jax.Array, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1
) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    return jnp.where(x > 0, x * scale, jnp.expm1(x * input_scale) * (alpha * scale))


@lowering("aten.elu_backward.default")
def _elu_backward(
    ctx: LoweringContext,
    grad_output: jax.Array,
    alpha: Scalar,
    scale: Scalar,
    input_scale: Scalar,
    is_result: bool,
    self_or_result: jax.Array,
) -> jax.Array:
    grad, x = cast(grad_output, ctx.compute_dtype), cast(self_or_result, ctx.compute_dtype)
    if is_result:
        negative = grad * input_scale * (x + alpha * scale)
    else:
        negative = grad * (input_scale * alpha * scale) * jnp.exp(x * input_scale)
    return jnp.where(x <= 0, negative, grad * scale)


@lowering("aten.softplus.default")
def _softplus(ctx: LoweringContext, self: jax.Array, beta: Scalar = 1, threshold: Scalar = 20) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta)


@lowering("aten.softplus_backward.default")
def _softplus_backward(
    ctx: LoweringContext, grad_output: jax.Array, self: jax.Array, beta: Scalar, threshold: Scalar
) -> jax.Array:
    grad, x = cast(grad_output, ctx.compute_dtype), cast(self, ctx.compute_dtype)
    return jnp.where(x * beta > threshold, grad, grad * jax.nn.sigmoid(x * beta))


@lowering("aten.hardtanh.default")
def _hardtanh(ctx: LoweringContext, self: jax.Array, min_val: Scalar = -1, max_val: Scalar = 1) -> jax.Array:
    return jnp.clip(self, cast(min_val, self.dtype), cast(max_val, self.dtype))


@lowering("aten.hardtanh_backward.default")
def _hardtanh_backward(
    ctx: LoweringContext, grad_output: jax.Array, self: jax.Array, min_val: Scalar, max_val: Scalar
) -> jax.Array:
    outside = (self <= cast(min_val, self.dtype)) | (self >= cast(max_val, self.dtype))
    return jnp.where(outside, grad_output.dtype.type(0), grad_output)


@lowering("aten.hardsigmoid.default")
def _hardsigmoid(ctx: LoweringContext, self: jax.Array) -> jax.Array:
    return jnp.clip(cast(self, ctx.compute_dtype) + 3.0, 0.0, 6.0) / 6.0


@lowering("aten.hardsigmoid_backward.default")
def _hardsigmoid_backward(ctx: LoweringContext, grad_output: jax.Array, self: jax.Array) -> jax.Array:
    grad, x = cast(grad_output, ctx.compute_dtype), cast(self, ctx.compute_dtype)
    return jnp.where((x > -3.0) & (x < 3.0), grad / 6.0, 0.0)


@lowering("aten.hardswish.default")
def _hardswish(ctx: LoweringContext, self: jax.Array) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    return x * jnp.clip(x + 3.0, 0.0, 6.0) / 6.0


@lowering("aten.hardswish_backward.default")
def _hardswish_backward(ctx: LoweringContext, grad_output: jax.Array, self: jax.Array) -> jax.Array:
    grad, x = cast(grad_output, ctx.compute_dtype), cast(self, ctx.compute_dtype)
    return jnp.where(x <= -3.0, 0.0, jnp.where(x < 3.0, grad * (x / 3.0 + 0.5), grad))


@lowering("aten.log_sigmoid_forward.default")
def _log_sigmoid_forward(ctx: LoweringContext, self: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The second result is a buffer that torch fills on CPU only and that our backward does not read.
    x = cast(self, ctx.compute_dtype)
    tail = jnp.exp(-jnp.abs(x))
    buffer = jnp.zeros(ctx.out[1].shape, x.dtype) if ctx.out[1].shape != x.shape else tail
    return jnp.minimum(x, 0.0) - jnp.log1p(tail), buffer


@lowering("aten.log_sigmoid_backward.default")
def _log_sigmoid_backward(
    ctx: LoweringContext, grad_output: jax.Array, self: jax.Array, buffer: jax.Array
) -> jax.Array:
    grad, x = cast(grad_output, ctx.compute_dtype), cast(self, ctx.compute_dtype)
    return grad * jax.nn.sigmoid(-x)


@lowering("aten.mish.default")
def _mish(ctx: LoweringContext, self: jax.Array) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    return x * jnp.tanh(jax.nn.softplus(x))


@lowering("aten.mish_backward.default")
def _mish_backward(ctx: LoweringContext, grad_output: jax.Array, self: jax.Array) -> jax.Array:
    grad, x = cast(grad_output, ctx.compute_dtype), cast(self, ctx.compute_dtype)
    tanh = jnp.tanh(jax.nn.softplus(x))
    return grad * (tanh + x * jax.nn.sigmoid(x) * (1.0 - tanh * tanh))


@lowering("aten.glu.default")
def _glu(ctx: LoweringContext, self: jax.Array, dim: int = -1) -> jax.Array:
    value, gate = jnp.split(cast(self, ctx.compute_dtype), 2, axis=dim)
    return value * jax.nn.sigmoid(gate)


@lowering("aten.glu_backward.default")
def _glu_backward(ctx: LoweringContext, grad_output: jax.Array, self: jax.Array, dim: int) -> jax.Array:
    grad = cast(grad_output, ctx.compute_dtype)
    value, gate = jnp.split(cast(self, ctx.compute_dtype), 2, axis=dim)
    sigmoid = jax.nn.sigmoid(gate)
    return jnp.concatenate([grad * sigmoid, grad * value * sigmoid * (1.0 - sigmoid)], axis=dim)


@lowering("aten._prelu_kernel.default")
def _prelu(ctx: LoweringContext, self: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.where(self > 0, self, self * weight)


@lowering("aten._prelu_kernel_backward.default")
def _prelu_backward(
    ctx: LoweringContext, grad_output: jax.Array, self: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    zero = self.dtype.type(0)
    return jnp.where(self > 0, grad_output, grad_output * weight), jnp.where(self > 0, zero, self * grad_output)


@lowering("aten.logit.default")
def _logit(ctx: LoweringContext, self: jax.Array, eps: float | None = None) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    if eps is not None:
        x = jnp.clip(x, eps, 1.0 - eps)
    return jnp.log(x / (1.0 - x))
