"""Losses and their backwards. `reduction` is torch's number: 0 none, 1 mean, 2 sum."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from titan.graph.lowering.dtypes import Scalar, cast
from titan.graph.lowering.table import LoweringContext, lowering

_NONE, _MEAN, _SUM = 0, 1, 2


def _nll_weights(
    x: jax.Array,  # (*batch, C, *spatial), classes along `dim`
    target: jax.Array,  # (*batch, *spatial)
    weight: jax.Array | None,  # (C,)
    ignore_index: int,
    dim: int,
) -> tuple[jax.Array, jax.Array]:
    """The index into the class dim, 0 where the target is ignored, and each target's weight, 0 where it is ignored."""
    counted = target != ignore_index
    index = jnp.where(counted, target, 0)
    weights = counted.astype(x.dtype)
    if weight is not None:
        weights = weights * cast(weight, x.dtype)[index]
    return jnp.expand_dims(index, dim), weights


def _class_dim(x: jax.Array) -> int:
    return 0 if x.ndim == 1 else 1


@lowering("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def _nll_loss_forward(
    ctx: LoweringContext,
    self: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
) -> tuple[jax.Array, jax.Array]:
    x, dim = cast(self, ctx.compute_dtype), _class_dim(self)
    target = target.reshape(x.shape[:dim] + x.shape[dim + 1 :])
    index, weights = _nll_weights(x, target, weight, ignore_index, dim)
    chosen = jnp.take_along_axis(x, index, axis=dim, mode="fill", fill_value=np.nan)
    losses = jnp.where(weights == 0, 0.0, -weights * jnp.squeeze(chosen, dim))
    if reduction == _NONE:
        return losses, jnp.sum(weights) if x.ndim == 1 else jnp.zeros((), x.dtype)
    total_weight = jnp.sum(weights)
    total = jnp.sum(losses)
    return (total / total_weight if reduction == _MEAN else total), total_weight


@lowering("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def _nll_loss_backward(
    ctx: LoweringContext,
    grad_output: jax.Array,
    self: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: jax.Array,
) -> jax.Array:
    grad, dim = cast(grad_output, ctx.compute_dtype), _class_dim(self)
    target = target.reshape(self.shape[:dim] + self.shape[dim + 1 :])
    index, weights = _nll_weights(cast(self, ctx.compute_dtype), target, weight, ignore_index, dim)
    scale = grad / cast(total_weight, grad.dtype) if reduction == _MEAN else grad
    values = jnp.expand_dims(jnp.where(weights == 0, 0.0, -weights * scale), dim)
    # A comparison with an iota instead of a scatter: XLA fuses it into whatever consumes the gradient.
    classes = lax.broadcasted_iota(index.dtype, self.shape, dim)
    return jnp.where(classes == index, values, 0.0)


def _reduced(losses: jax.Array, reduction: int) -> jax.Array:
    if reduction == _NONE:
        return losses
    total = jnp.sum(losses)
    return total / np.float32(losses.size) if reduction == _MEAN else total


def _per_element(grad_output: jax.Array, like: jax.Array, reduction: int) -> jax.Array:
    """The gradient of each element's loss, given that of the reduced loss."""
    return grad_output / np.float32(like.size) if reduction == _MEAN else grad_output


@lowering("aten.mse_loss.default")
def _mse_loss(ctx: LoweringContext, self: jax.Array, target: jax.Array, reduction: int = _MEAN) -> jax.Array:
    return _reduced(jnp.square(cast(self, ctx.compute_dtype) - cast(target, ctx.compute_dtype)), reduction)


@lowering("aten.mse_loss_backward.default")
def _mse_loss_backward(
    ctx: LoweringContext, grad_output: jax.Array, self: jax.Array, target: jax.Array, reduction: int
) -> jax.Array:
    grad, x, y = (cast(operand, ctx.compute_dtype) for operand in (grad_output, self, target))
    return 2.0 * (x - y) * _per_element(grad, x, reduction)


@lowering("aten.smooth_l1_loss.default")
def _smooth_l1_loss(
    ctx: LoweringContext, self: jax.Array, target: jax.Array, reduction: int = _MEAN, beta: float = 1.0
) -> jax.Array:
    distance = jnp.abs(cast(self, ctx.compute_dtype) - cast(target, ctx.compute_dtype))
    if beta == 0:
        return _reduced(distance, reduction)
    return _reduced(jnp.where(distance < beta, 0.5 * distance * distance / beta, distance - 0.5 * beta), reduction)


@lowering("aten.smooth_l1_loss_backward.default")
def _smooth_l1_loss_backward(
    ctx: LoweringContext, grad_output: jax.Array, self: jax.Array, target: jax.Array, reduction: int, beta: float
) -> jax.Array:
    grad, x, y = (cast(operand, ctx.compute_dtype) for operand in (grad_output, self, target))
    grad, difference = _per_element(grad, x, reduction), x - y
    slope = jnp.sign(difference)
    return grad * (slope if beta == 0 else jnp.where(jnp.abs(difference) < beta, difference / beta, slope))


@lowering("aten.huber_loss.default")
def _huber_loss(
    ctx: LoweringContext, self: jax.Array, target: jax.Array, reduction: int = _MEAN, delta: float = 1.0
) -> jax.Array:
    distance = jnp.abs(cast(self, ctx.compute_dtype) - cast(target, ctx.compute_dtype))
    return _reduced(
        jnp.where(distance <= delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta)), reduction
    )


@lowering("aten.huber_loss_backward.default")
def _huber_loss_backward(
    ctx: LoweringContext, grad_output: jax.Array, self: jax.Array, target: jax.Array, reduction: int, delta: float
) -> jax.Array:
    grad, x, y = (cast(operand, ctx.compute_dtype) for operand in (grad_output, self, target))
    return _per_element(grad, x, reduction) * jnp.clip(x - y, -delta, delta)


@lowering("aten.binary_cross_entropy_with_logits.default")
def _bce_with_logits(
    ctx: LoweringContext,
    self: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    pos_weight: jax.Array | None = None,
    reduction: int = _MEAN,
) -> jax.Array:
    x, y = cast(self, ctx.compute_dtype), cast(target, ctx.compute_dtype)
    positive: jax.Array | Scalar = 1.0 if pos_weight is None else (cast(pos_weight, x.dtype) - 1.0) * y + 1.0
    losses = (1.0 - y) * x - positive * jax.nn.log_sigmoid(x)
    return _reduced(losses if weight is None else losses * cast(weight, x.dtype), reduction)


@lowering("aten.binary_cross_entropy.default")
def _binary_cross_entropy(
    ctx: LoweringContext, self: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = _MEAN
) -> jax.Array:
    x, y = cast(self, ctx.compute_dtype), cast(target, ctx.compute_dtype)
    # torch cuts the logarithms at -100 so that a certain and wrong prediction has a finite loss.
    losses = -(y * jnp.maximum(jnp.log(x), -100.0) + (1.0 - y) * jnp.maximum(jnp.log1p(-x), -100.0))
    return _reduced(losses if weight is None else losses * cast(weight, x.dtype), reduction)


@lowering("aten.binary_cross_entropy_backward.default")
def _binary_cross_entropy_backward(
    ctx: LoweringContext,
    grad_output: jax.Array,
    self: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    reduction: int = _MEAN,
) -> jax.Array:
    grad, x, y = (cast(operand, ctx.compute_dtype) for operand in (grad_output, self, target))
    slope = (x - y) / jnp.maximum((1.0 - x) * x, 1e-12)
    grad = _per_element(grad, x, reduction) * slope
    return grad if weight is None else grad * cast(weight, x.dtype)
