"""`_foreach` ops of fused optimizers: the plain op on each tensor of the lists."""

import dataclasses
from collections.abc import Sequence

import jax

import titan.graph.lowering.aten.pointwise
import titan.graph.lowering.aten.reduction  # noqa: F401 (the plain ops below come from these two)
from titan.graph.lowering.dtypes import Scalar
from titan.graph.lowering.table import TABLE, LoweringContext, lowering

Tensors = Sequence[jax.Array]


def _element(ctx: LoweringContext, i: int) -> LoweringContext:
    return dataclasses.replace(ctx, out=(ctx.out[i],))


def _unary(name: str) -> None:
    @lowering(f"aten._foreach_{name}.default")
    def lower_unary(ctx: LoweringContext, self: Tensors) -> tuple[jax.Array, ...]:
        plain = TABLE[f"aten.{name}.default"]
        return tuple(plain(_element(ctx, i), x) for i, x in enumerate(self))


for _name in ("abs", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt"):
    _unary(_name)


def _binary(name: str, plain_tensor: str, plain_scalar: str) -> None:
    @lowering(f"aten._foreach_{name}.Scalar")
    def lower_scalar(ctx: LoweringContext, self: Tensors, scalar: Scalar) -> tuple[jax.Array, ...]:
        return tuple(TABLE[plain_scalar](_element(ctx, i), x, scalar) for i, x in enumerate(self))

    @lowering(f"aten._foreach_{name}.ScalarList")
    def lower_scalar_list(ctx: LoweringContext, self: Tensors, scalars: Sequence[Scalar]) -> tuple[jax.Array, ...]:
        pairs = zip(self, scalars, strict=True)
        return tuple(TABLE[plain_scalar](_element(ctx, i), x, scalar) for i, (x, scalar) in enumerate(pairs))

    @lowering(f"aten._foreach_{name}.List")
    def lower_list(ctx: LoweringContext, self: Tensors, other: Tensors, **options: Scalar) -> tuple[jax.Array, ...]:
        pairs = zip(self, other, strict=True)
        return tuple(TABLE[plain_tensor](_element(ctx, i), x, y, **options) for i, (x, y) in enumerate(pairs))


for _name in ("add", "sub", "mul", "div"):
    _binary(_name, f"aten.{_name}.Tensor", f"aten.{_name}.Scalar")
_binary("maximum", "aten.maximum.default", "aten.clamp_min.default")
_binary("minimum", "aten.minimum.default", "aten.clamp_max.default")
_binary("clamp_min", "aten.clamp_min.Tensor", "aten.clamp_min.default")
_binary("clamp_max", "aten.clamp_max.Tensor", "aten.clamp_max.default")


def _tensor_operand(name: str) -> None:
    @lowering(f"aten._foreach_{name}.Tensor")
    def lower_tensor(ctx: LoweringContext, self: Tensors, other: jax.Array, **options: Scalar) -> tuple[jax.Array, ...]:
        plain = TABLE[f"aten.{name}.Tensor"]
        return tuple(plain(_element(ctx, i), x, other, **options) for i, x in enumerate(self))


for _name in ("add", "mul", "div"):
    _tensor_operand(_name)


@lowering("aten._foreach_pow.Scalar")
def _foreach_pow(ctx: LoweringContext, self: Tensors, exponent: Scalar) -> tuple[jax.Array, ...]:
    return tuple(TABLE["aten.pow.Tensor_Scalar"](_element(ctx, i), x, exponent) for i, x in enumerate(self))


@lowering("aten._foreach_lerp.List")
def _foreach_lerp(
    ctx: LoweringContext, self: Tensors, tensors1: Tensors, weights: Sequence[jax.Array | Scalar]
) -> tuple[jax.Array, ...]:
    triples = zip(self, tensors1, weights, strict=True)
    return tuple(TABLE["aten.lerp.Scalar"](_element(ctx, i), *operands) for i, operands in enumerate(triples))


@lowering("aten._foreach_lerp.ScalarList")
def _foreach_lerp_scalar_list(
    ctx: LoweringContext, self: Tensors, tensors1: Tensors, weight: Sequence[Scalar]
) -> tuple[jax.Array, ...]:
    return _foreach_lerp(ctx, self, tensors1, weight)


@lowering("aten._foreach_lerp.Scalar")
def _foreach_lerp_scalar(
    ctx: LoweringContext, self: Tensors, tensors1: Tensors, weight: Scalar
) -> tuple[jax.Array, ...]:
    return _foreach_lerp(ctx, self, tensors1, [weight] * len(self))


def _fused_ternary(name: str) -> None:
    @lowering(f"aten._foreach_{name}.Scalar")
    def lower_scalar(
        ctx: LoweringContext, self: Tensors, tensor1: Tensors, tensor2: Tensors, value: Scalar = 1
    ) -> tuple[jax.Array, ...]:
        triples = zip(self, tensor1, tensor2, strict=True)
        return tuple(TABLE[f"aten.{name}.default"](_element(ctx, i), *xs, value=value) for i, xs in enumerate(triples))

    @lowering(f"aten._foreach_{name}.ScalarList")
    def lower_scalar_list(
        ctx: LoweringContext, self: Tensors, tensor1: Tensors, tensor2: Tensors, scalars: Sequence[Scalar]
    ) -> tuple[jax.Array, ...]:
        rows = zip(self, tensor1, tensor2, scalars, strict=True)
        return tuple(
            TABLE[f"aten.{name}.default"](_element(ctx, i), x, y, z, value=value)
            for i, (x, y, z, value) in enumerate(rows)
        )


_fused_ternary("addcmul")
_fused_ternary("addcdiv")


@lowering("aten._foreach_norm.Scalar")
def _foreach_norm(ctx: LoweringContext, self: Tensors, ord: Scalar = 2, dtype=None) -> tuple[jax.Array, ...]:
    return tuple(TABLE["aten.linalg_vector_norm.default"](_element(ctx, i), x, ord) for i, x in enumerate(self))
