"""Elementwise arithmetic, comparison, logic and rounding.

Integer and bool operands of float maths are converted to the result's dtype; narrow floats are computed in float32
where rounding the operands or intermediates first would differ from what torch does.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from titan.graph.lowering.dtypes import Scalar, cast, is_exact, promote
from titan.graph.lowering.table import LoweringContext, lowering

Operand = jax.Array | Scalar


def _float_unary(name: str, function: Callable[[jax.Array], jax.Array]) -> None:
    @lowering(name)
    def lower_unary(ctx: LoweringContext, self: jax.Array) -> jax.Array:
        return function(cast(self, ctx.compute_dtype))


def _digamma(x: jax.Array) -> jax.Array:
    # At the pole torch takes the limit from the side of the zero's sign.
    return jnp.where(x == 0, -jnp.copysign(x.dtype.type(np.inf), x), jax.scipy.special.digamma(x))


for _name, _function in {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "deg2rad": lambda x: x * x.dtype.type(math.pi / 180),
    "digamma": _digamma,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "lgamma": lax.lgamma,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "rad2deg": lambda x: x * x.dtype.type(180 / math.pi),
    "reciprocal": jnp.reciprocal,
    "rsqrt": lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sin": jnp.sin,
    "sinc": jnp.sinc,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}.items():
    _float_unary(f"aten.{_name}.default", _function)


def _same_dtype_unary(name: str, function: Callable[[jax.Array], jax.Array]) -> None:
    @lowering(name)
    def lower_unary(ctx: LoweringContext, self: jax.Array) -> jax.Array:
        return function(self)


def _unless_integer(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _sign(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x
    zero = x.dtype.type(0)
    return (x > zero).astype(x.dtype) - (x < zero).astype(x.dtype)  # 0 for NaN, unlike jnp.sign


for _name, _function in {
    "abs": jnp.abs,
    "bitwise_not": jnp.bitwise_not,
    "ceil": _unless_integer(jnp.ceil),
    "floor": _unless_integer(jnp.floor),
    "frac": lambda x: x - jnp.trunc(x),
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "isneginf": jnp.isneginf,
    "isposinf": jnp.isposinf,
    "logical_not": jnp.logical_not,
    "neg": jnp.negative,
    "round": _unless_integer(jnp.round),
    "sgn": _sign,
    "sign": _sign,
    "signbit": lambda x: jnp.signbit(x) if jnp.issubdtype(x.dtype, jnp.floating) else x < x.dtype.type(0),
    "trunc": _unless_integer(jnp.trunc),
}.items():
    _same_dtype_unary(f"aten.{_name}.default", _function)


@lowering("aten.round.decimals")
def _round_decimals(ctx: LoweringContext, self: jax.Array, *, decimals: int) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    scale = x.dtype.type(10.0 ** abs(decimals))
    return jnp.round(x * scale) / scale if decimals >= 0 else jnp.round(x / scale) * scale


@lowering("aten.nan_to_num.default")
def _nan_to_num(
    ctx: LoweringContext,
    self: jax.Array,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> jax.Array:
    if not jnp.issubdtype(self.dtype, jnp.floating):
        return self
    return jnp.nan_to_num(self, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


def _arithmetic_dtype(ctx: LoweringContext, *operands: Operand) -> Any:
    """The result's dtype, or float32 if a number among the operands cannot be written in a narrow float result."""
    numbers = [o for o in operands if isinstance(o, (bool, int, float))]
    exact = ctx.dtype == ctx.compute_dtype or all(is_exact(number, ctx.dtype) for number in numbers)
    return ctx.dtype if exact else ctx.compute_dtype


@lowering("aten.add.Tensor", "aten.add.Scalar")
def _add(ctx: LoweringContext, self: Operand, other: Operand, alpha: Scalar = 1) -> jax.Array:
    if alpha != 1:
        return cast(self, ctx.compute_dtype) + cast(other, ctx.compute_dtype) * cast(alpha, ctx.compute_dtype)
    dtype = _arithmetic_dtype(ctx, self, other)
    return jnp.add(cast(self, dtype), cast(other, dtype))


@lowering("aten.sub.Tensor", "aten.sub.Scalar")
def _sub(ctx: LoweringContext, self: Operand, other: Operand, alpha: Scalar = 1) -> jax.Array:
    if alpha != 1:
        return cast(self, ctx.compute_dtype) - cast(other, ctx.compute_dtype) * cast(alpha, ctx.compute_dtype)
    dtype = _arithmetic_dtype(ctx, self, other)
    return jnp.subtract(cast(self, dtype), cast(other, dtype))


@lowering("aten.rsub.Tensor", "aten.rsub.Scalar")
def _rsub(ctx: LoweringContext, self: Operand, other: Operand, alpha: Scalar = 1) -> jax.Array:
    return _sub(ctx, other, self, alpha)


@lowering("aten.mul.Tensor", "aten.mul.Scalar")
def _mul(ctx: LoweringContext, self: Operand, other: Operand) -> jax.Array:
    dtype = _arithmetic_dtype(ctx, self, other)
    return jnp.multiply(cast(self, dtype), cast(other, dtype))


@lowering("aten.div.Tensor", "aten.div.Scalar")
def _div(ctx: LoweringContext, self: Operand, other: Operand) -> jax.Array:
    dtype = _arithmetic_dtype(ctx, self, other)
    return jnp.divide(cast(self, dtype), cast(other, dtype))


@lowering("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _div_mode(ctx: LoweringContext, self: Operand, other: Operand, *, rounding_mode: str | None) -> jax.Array:
    if rounding_mode is None:
        return _div(ctx, self, other)
    if rounding_mode == "floor":
        return _floor_divide(ctx, self, other)
    x, y = cast(self, ctx.compute_dtype), cast(other, ctx.compute_dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.div(*jnp.broadcast_arrays(x, y))
    quotient, remainder = _exact_division(x, y)
    return jnp.where(jnp.isnan(remainder), jnp.trunc(x / y), quotient)


@lowering("aten.floor_divide.default")
def _floor_divide(ctx: LoweringContext, self: Operand, other: Operand) -> jax.Array:
    x, y = cast(self, ctx.compute_dtype), cast(other, ctx.compute_dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.floor_divide(x, y)
    quotient, remainder = _exact_division(x, y)
    signs_differ = (remainder != 0) & ((remainder < 0) != (y < 0))
    return jnp.where(y == 0, x / y, jnp.where(signs_differ, quotient - x.dtype.type(1), quotient))


def _exact_division(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The truncated quotient and the remainder.

    XLA may divide by multiplying with 1 / y, so that x / y can miss a whole number by one bit.
    """
    remainder = jnp.fmod(x, y)
    return jnp.round((x - remainder) / y), remainder


@lowering("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def _remainder(ctx: LoweringContext, self: Operand, other: Operand) -> jax.Array:
    return jnp.remainder(cast(self, ctx.compute_dtype), cast(other, ctx.compute_dtype))


@lowering("aten.fmod.Tensor", "aten.fmod.Scalar")
def _fmod(ctx: LoweringContext, self: Operand, other: Operand) -> jax.Array:
    return jnp.fmod(cast(self, ctx.compute_dtype), cast(other, ctx.compute_dtype))


@lowering("aten.pow.Tensor_Tensor", "aten.pow.Scalar")
def _pow(ctx: LoweringContext, self: Operand, exponent: Operand) -> jax.Array:
    base, exponent = cast(self, ctx.compute_dtype), cast(exponent, ctx.compute_dtype)
    if not jnp.issubdtype(base.dtype, jnp.integer):
        return jnp.power(base, exponent)
    zero, one = base.dtype.type(0), base.dtype.type(1)
    # The reciprocal of an integer, truncated: 0 unless the base is 1 or -1.
    reciprocal = jnp.where(jnp.abs(base) == one, jnp.where(exponent & one == one, base, one), zero)
    return jnp.where(exponent < zero, reciprocal, jnp.power(base, jnp.maximum(exponent, zero)))


@lowering("aten.pow.Tensor_Scalar")
def _pow_scalar(ctx: LoweringContext, self: jax.Array, exponent: Scalar) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    if float(exponent).is_integer() and abs(exponent) <= 8:
        return lax.integer_pow(x, int(exponent))
    if exponent == 0.5:
        return jnp.sqrt(x)
    if exponent == -0.5:
        return lax.rsqrt(x)
    return jnp.power(x, cast(exponent, ctx.compute_dtype))


def _float_binary(name: str, function: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    @lowering(name)
    def lower_binary(ctx: LoweringContext, self: Operand, other: Operand) -> jax.Array:
        return function(cast(self, ctx.compute_dtype), cast(other, ctx.compute_dtype))


def _xlogy(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(y), y, jnp.where(x == 0, x.dtype.type(0), x * jnp.log(y)))


for _name, _function in {
    "atan2.default": jnp.arctan2,
    "copysign.Tensor": jnp.copysign,
    "copysign.Scalar": jnp.copysign,
    "hypot.default": jnp.hypot,
    "logaddexp.default": jnp.logaddexp,
    "logaddexp2.default": jnp.logaddexp2,
    "xlogy.Tensor": _xlogy,
    "xlogy.Scalar_Other": _xlogy,
    "xlogy.Scalar_Self": _xlogy,
}.items():
    _float_binary(f"aten.{_name}", _function)


def _same_dtype_binary(name: str, function: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    @lowering(name)
    def lower_binary(ctx: LoweringContext, self: Operand, other: Operand) -> jax.Array:
        return function(cast(self, ctx.dtype), cast(other, ctx.dtype))


for _name, _function in {
    "bitwise_and.Tensor": jnp.bitwise_and,
    "bitwise_and.Scalar": jnp.bitwise_and,
    "bitwise_or.Tensor": jnp.bitwise_or,
    "bitwise_or.Scalar": jnp.bitwise_or,
    "bitwise_xor.Tensor": jnp.bitwise_xor,
    "bitwise_xor.Scalar": jnp.bitwise_xor,
    "bitwise_left_shift.Tensor": jnp.left_shift,
    "bitwise_left_shift.Tensor_Scalar": jnp.left_shift,
    "bitwise_right_shift.Tensor": jnp.right_shift,
    "bitwise_right_shift.Tensor_Scalar": jnp.right_shift,
    "__lshift__.Tensor": jnp.left_shift,
    "__lshift__.Scalar": jnp.left_shift,
    "__rshift__.Tensor": jnp.right_shift,
    "__rshift__.Scalar": jnp.right_shift,
    "fmax.default": jnp.fmax,
    "fmin.default": jnp.fmin,
    "maximum.default": jnp.maximum,
    "minimum.default": jnp.minimum,
    "gcd.default": jnp.gcd,
    "lcm.default": jnp.lcm,
}.items():
    _same_dtype_binary(f"aten.{_name}", _function)


def _comparison(name: str, function: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    @lowering(f"aten.{name}.Tensor", f"aten.{name}.Scalar")
    def lower_comparison(ctx: LoweringContext, self: jax.Array, other: Operand) -> jax.Array:
        return function(*promote(self, other))


for _name, _function in {
    "eq": jnp.equal,
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "le": jnp.less_equal,
    "lt": jnp.less,
    "ne": jnp.not_equal,
}.items():
    _comparison(_name, _function)


def _logical(name: str, function: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    @lowering(name)
    def lower_logical(ctx: LoweringContext, self: jax.Array, other: jax.Array) -> jax.Array:
        return function(self.astype(jnp.bool_), other.astype(jnp.bool_))


for _name, _function in {"and": jnp.logical_and, "or": jnp.logical_or, "xor": jnp.logical_xor}.items():
    _logical(f"aten.logical_{_name}.default", _function)


@lowering("aten.where.self")
def _where(ctx: LoweringContext, condition: jax.Array, self: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.where(condition.astype(jnp.bool_), cast(self, ctx.dtype), cast(other, ctx.dtype))


@lowering("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(ctx: LoweringContext, self: jax.Array, mask: jax.Array, value: Operand) -> jax.Array:
    return jnp.where(mask, cast(value, ctx.dtype), self)


@lowering("aten.clamp.default", "aten.clamp.Tensor")
def _clamp(ctx: LoweringContext, self: jax.Array, min: Operand | None = None, max: Operand | None = None) -> jax.Array:
    # torch and XLA agree here: with min > max the result is max, and NaN anywhere gives NaN.
    x = cast(self, ctx.dtype)
    if min is not None:
        x = jnp.maximum(x, cast(min, ctx.dtype))
    return x if max is None else jnp.minimum(x, cast(max, ctx.dtype))


@lowering("aten.clamp_min.default", "aten.clamp_min.Tensor")
def _clamp_min(ctx: LoweringContext, self: jax.Array, min: Operand) -> jax.Array:
    return _clamp(ctx, self, min=min)


@lowering("aten.clamp_max.default", "aten.clamp_max.Tensor")
def _clamp_max(ctx: LoweringContext, self: jax.Array, max: Operand) -> jax.Array:
    return _clamp(ctx, self, max=max)


@lowering("aten.lerp.Scalar", "aten.lerp.Tensor")
def _lerp(ctx: LoweringContext, self: jax.Array, end: jax.Array, weight: Operand) -> jax.Array:
    start, end, weight = (cast(operand, ctx.compute_dtype) for operand in (self, end, weight))
    one = start.dtype.type(1)
    # torch's two forms, each exact at its own end of the interval.
    return jnp.where(
        jnp.abs(weight) < start.dtype.type(0.5), start + weight * (end - start), end - (end - start) * (one - weight)
    )


@lowering("aten.addcmul.default")
def _addcmul(
    ctx: LoweringContext, self: jax.Array, tensor1: jax.Array, tensor2: jax.Array, *, value: Scalar = 1
) -> jax.Array:
    self, tensor1, tensor2, value = (cast(operand, ctx.compute_dtype) for operand in (self, tensor1, tensor2, value))
    return self + value * tensor1 * tensor2


@lowering("aten.addcdiv.default")
def _addcdiv(
    ctx: LoweringContext, self: jax.Array, tensor1: jax.Array, tensor2: jax.Array, *, value: Scalar = 1
) -> jax.Array:
    self, tensor1, tensor2, value = (cast(operand, ctx.compute_dtype) for operand in (self, tensor1, tensor2, value))
    return self + value * tensor1 / tensor2


@lowering("aten.heaviside.default")
def _heaviside(ctx: LoweringContext, self: jax.Array, values: jax.Array) -> jax.Array:
    zero, one = self.dtype.type(0), self.dtype.type(1)
    return jnp.where(self == zero, values, jnp.where(self > zero, one, zero))


@lowering("aten.complex.default")
def _complex(ctx: LoweringContext, real: jax.Array, imag: jax.Array) -> jax.Array:
    return lax.complex(*jnp.broadcast_arrays(real, imag))
