"""Matrix products and convolutions. Narrow floats are multiplied as they are and accumulated in float32."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from titan.graph.lowering.dtypes import Scalar, cast, compute_dtype
from titan.graph.lowering.table import LoweringContext, lowering


def dot(
    ctx: LoweringContext,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    contract: tuple[int, int],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> jax.Array:
    """`lax.dot_general` over one contracted dim of each operand, with the result in float32 for narrow floats.

    Integers are accumulated in int32, also those of fewer bits.
    """
    accumulate = compute_dtype(lhs.dtype)
    if jnp.issubdtype(accumulate, jnp.integer):
        accumulate = np.dtype(np.int32)
    return lax.dot_general(
        lhs,
        rhs,
        dimension_numbers=(((contract[0],), (contract[1],)), batch),
        precision=ctx.matmul_precision,
        preferred_element_type=accumulate,
    )


def _batched(ctx: LoweringContext, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return dot(ctx, lhs, rhs, contract=(2, 1), batch=((0,), (0,)))


def _plus_product(ctx: LoweringContext, bias: jax.Array, product: jax.Array, beta: Scalar, alpha: Scalar) -> jax.Array:
    """`beta * bias + alpha * product`, where a beta of 0 discards the bias even if it is not finite."""
    if alpha != 1:
        product = product * cast(alpha, product.dtype)
    if beta == 0:
        return product
    bias = cast(bias, product.dtype)
    return product + (bias if beta == 1 else bias * cast(beta, product.dtype))


@lowering("aten.mm.default")
def _mm(ctx: LoweringContext, self: jax.Array, mat2: jax.Array) -> jax.Array:
    if ctx.platform == "cpu" and ctx.is_first_transposed and ctx.shape[0] > ctx.shape[1]:
        # The gradient of a weight with more outputs than inputs. XLA's CPU dot takes up to 1.6 times as long for it as
        # for its transposition; without the barrier the two transpositions would be folded back into the slow form.
        return lax.optimization_barrier(dot(ctx, mat2, self, contract=(0, 1))).T
    return dot(ctx, self, mat2, contract=(1, 0))


@lowering("aten._int_mm.default")
def _int_mm(ctx: LoweringContext, self: jax.Array, mat2: jax.Array) -> jax.Array:
    return dot(ctx, self, mat2, contract=(1, 0))


@lowering("aten.bmm.default")
def _bmm(ctx: LoweringContext, self: jax.Array, mat2: jax.Array) -> jax.Array:
    return _batched(ctx, self, mat2)


@lowering("aten.mv.default")
def _mv(ctx: LoweringContext, self: jax.Array, vec: jax.Array) -> jax.Array:
    return dot(ctx, self, vec, contract=(1, 0))


@lowering("aten.dot.default")
def _dot(ctx: LoweringContext, self: jax.Array, tensor: jax.Array) -> jax.Array:
    return dot(ctx, self, tensor, contract=(0, 0))


@lowering("aten.addmm.default")
def _addmm(
    ctx: LoweringContext, self: jax.Array, mat1: jax.Array, mat2: jax.Array, *, beta: Scalar = 1, alpha: Scalar = 1
) -> jax.Array:
    return _plus_product(ctx, self, dot(ctx, mat1, mat2, contract=(1, 0)), beta, alpha)


@lowering("aten.addmv.default")
def _addmv(
    ctx: LoweringContext, self: jax.Array, mat: jax.Array, vec: jax.Array, *, beta: Scalar = 1, alpha: Scalar = 1
) -> jax.Array:
    return _plus_product(ctx, self, dot(ctx, mat, vec, contract=(1, 0)), beta, alpha)


@lowering("aten.baddbmm.default")
def _baddbmm(
    ctx: LoweringContext, self: jax.Array, batch1: jax.Array, batch2: jax.Array, *, beta: Scalar = 1, alpha: Scalar = 1
) -> jax.Array:
    return _plus_product(ctx, self, _batched(ctx, batch1, batch2), beta, alpha)


@lowering("aten.addbmm.default")
def _addbmm(
    ctx: LoweringContext, self: jax.Array, batch1: jax.Array, batch2: jax.Array, *, beta: Scalar = 1, alpha: Scalar = 1
) -> jax.Array:
    product = lax.dot_general(
        batch1,
        batch2,
        dimension_numbers=(((0, 2), (0, 1)), ((), ())),
        precision=ctx.matmul_precision,
        preferred_element_type=compute_dtype(batch1.dtype),
    )
    return _plus_product(ctx, self, product, beta, alpha)


@lowering("aten.addr.default")
def _addr(
    ctx: LoweringContext, self: jax.Array, vec1: jax.Array, vec2: jax.Array, *, beta: Scalar = 1, alpha: Scalar = 1
) -> jax.Array:
    if ctx.dtype == np.bool_:
        outer = jnp.outer(vec1, vec2) & bool(alpha)
        return outer | self if beta else outer
    outer = jnp.outer(cast(vec1, ctx.compute_dtype), cast(vec2, ctx.compute_dtype))
    return _plus_product(ctx, self, outer, beta, alpha)


def _padded_spatial(values: Sequence[int], num_spatial: int) -> tuple[int, ...]:
    """Per-dim numbers of a convolution: torch allows a single one for all spatial dims."""
    return tuple(values) * (num_spatial if len(values) == 1 else 1)


@lowering("aten.convolution.default")
def _convolution(
    ctx: LoweringContext,
    input: jax.Array,  # (batch, in_channels, *spatial)
    weight: jax.Array,  # (out_channels, in_channels / groups, *kernel); in and out change places if transposed
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    result = convolve(
        ctx, input, weight, stride=stride, padding=padding, dilation=dilation, transposed=transposed,
        output_padding=output_padding, groups=groups,
    )  # fmt: skip
    if bias is not None:
        result = result + cast(bias, result.dtype).reshape(-1, *[1] * (input.ndim - 2))
    return result


def convolve(
    ctx: LoweringContext,
    x: jax.Array,
    weight: jax.Array,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    """Torch's convolution without bias (layouts as in `aten.convolution`), accumulated in float32 for narrow floats."""
    num_spatial = x.ndim - 2
    stride, padding, dilation, output_padding = (
        _padded_spatial(values, num_spatial) for values in (stride, padding, dilation, output_padding)
    )
    options = {
        "rhs_dilation": dilation,
        "feature_group_count": groups,
        "precision": ctx.matmul_precision,
        "preferred_element_type": compute_dtype(x.dtype),
    }
    if not transposed:
        return lax.conv_general_dilated(x, weight, window_strides=stride, padding=[(p, p) for p in padding], **options)
    # The transpose of a convolution: the input is dilated by the stride, the kernel is flipped and swaps its channels
    # group by group.
    in_channels, out_per_group, *kernel = weight.shape
    weight = weight.reshape(groups, in_channels // groups, out_per_group, *kernel)
    weight = jnp.swapaxes(weight, 1, 2).reshape(groups * out_per_group, in_channels // groups, *kernel)
    weight = jnp.flip(weight, range(2, 2 + num_spatial))
    pads = []
    for d in range(num_spatial):
        reach = dilation[d] * (kernel[d] - 1) - padding[d]
        pads.append((reach, reach + output_padding[d]))
    return lax.conv_general_dilated(
        x, weight, window_strides=(1,) * num_spatial, padding=pads, lhs_dilation=stride, **options
    )


@lowering("aten.convolution_backward.default")
def _convolution_backward(
    ctx: LoweringContext,
    grad_output: jax.Array,
    input: jax.Array,
    weight: jax.Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    grad = cast(grad_output, input.dtype)

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        result = convolve(
            ctx, x, w, stride=stride, padding=padding, dilation=dilation, transposed=transposed,
            output_padding=output_padding, groups=groups,
        )  # fmt: skip
        return cast(result, grad.dtype)

    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        (grad_input,) = jax.linear_transpose(lambda x: forward(x, weight), input)(grad)
    if output_mask[1]:
        (grad_weight,) = jax.linear_transpose(lambda w: forward(input, w), weight)(grad)
    if output_mask[2]:
        wide = cast(grad, compute_dtype(grad.dtype))
        grad_bias = jnp.sum(wide, axis=(0, *range(2, grad.ndim)))
    return grad_input, grad_weight, grad_bias
