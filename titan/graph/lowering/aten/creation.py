"""Tensors made from shapes and numbers. Memory that torch leaves uninitialised is zero."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from titan.graph.lowering.dtypes import Scalar, cast, kind
from titan.graph.lowering.table import LoweringContext, lowering


def _filled(ctx: LoweringContext, value: Scalar) -> jax.Array:
    return jnp.full(ctx.shape, cast(value, ctx.dtype))


@lowering("aten.zeros.default", "aten.empty.memory_format")
def _zeros(
    ctx: LoweringContext,
    size: Sequence[int],
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
    memory_format=None,
) -> jax.Array:
    return _filled(ctx, 0)


@lowering("aten.empty_strided.default")
def _empty_strided(
    ctx: LoweringContext,
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
) -> jax.Array:
    return _filled(ctx, 0)


@lowering("aten.empty_permuted.default")
def _empty_permuted(
    ctx: LoweringContext,
    size: Sequence[int],
    physical_layout: Sequence[int],
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
) -> jax.Array:
    return _filled(ctx, 0)


@lowering("aten.ones.default")
def _ones(
    ctx: LoweringContext, size: Sequence[int], *, dtype=None, layout=None, device=None, pin_memory=None
) -> jax.Array:
    return _filled(ctx, 1)


@lowering("aten.full.default")
def _full(
    ctx: LoweringContext,
    size: Sequence[int],
    fill_value: Scalar,
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
) -> jax.Array:
    return _filled(ctx, fill_value)


@lowering("aten.scalar_tensor.default")
def _scalar_tensor(
    ctx: LoweringContext, s: Scalar, *, dtype=None, layout=None, device=None, pin_memory=None
) -> jax.Array:
    return _filled(ctx, s)


@lowering("aten.zeros_like.default", "aten.empty_like.default")
def _zeros_like(
    ctx: LoweringContext, self: jax.Array, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None
) -> jax.Array:
    return _filled(ctx, 0)


@lowering("aten.ones_like.default")
def _ones_like(
    ctx: LoweringContext, self: jax.Array, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None
) -> jax.Array:
    return _filled(ctx, 1)


@lowering("aten.full_like.default")
def _full_like(
    ctx: LoweringContext,
    self: jax.Array,
    fill_value: Scalar,
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
    memory_format=None,
) -> jax.Array:
    return _filled(ctx, fill_value)


@lowering("aten.new_zeros.default", "aten.new_empty.default")
def _new_zeros(
    ctx: LoweringContext, self: jax.Array, size: Sequence[int], *, dtype=None, layout=None, device=None, pin_memory=None
) -> jax.Array:
    return _filled(ctx, 0)


@lowering("aten.new_ones.default")
def _new_ones(
    ctx: LoweringContext, self: jax.Array, size: Sequence[int], *, dtype=None, layout=None, device=None, pin_memory=None
) -> jax.Array:
    return _filled(ctx, 1)


@lowering("aten.new_full.default")
def _new_full(
    ctx: LoweringContext,
    self: jax.Array,
    size: Sequence[int],
    fill_value: Scalar,
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
) -> jax.Array:
    return _filled(ctx, fill_value)


@lowering("aten.new_empty_strided.default")
def _new_empty_strided(
    ctx: LoweringContext,
    self: jax.Array,
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
) -> jax.Array:
    return _filled(ctx, 0)


@lowering("aten.fill.Scalar", "aten.fill.Tensor")
def _fill(ctx: LoweringContext, self: jax.Array, value: jax.Array | Scalar) -> jax.Array:
    return jnp.full(ctx.shape, cast(value, ctx.dtype))


@lowering("aten.zero.default")
def _zero(ctx: LoweringContext, self: jax.Array) -> jax.Array:
    return _filled(ctx, 0)


def _range(ctx: LoweringContext, start: Scalar, step: Scalar) -> jax.Array:
    (length,) = ctx.shape
    # Floats are computed as start + i * step in float32, so that no error builds up and a narrow result is rounded
    # once.
    dtype = np.dtype(np.int32) if kind(ctx.dtype) == "int" else np.dtype(np.float32)
    steps = jnp.arange(length, dtype=dtype)
    steps = steps if step == 1 else steps * cast(step, dtype)
    return cast(steps if start == 0 else steps + cast(start, dtype), ctx.dtype)


@lowering("aten.arange.default")
def _arange(ctx: LoweringContext, end: Scalar, *, dtype=None, layout=None, device=None, pin_memory=None) -> jax.Array:
    return _range(ctx, 0, 1)


@lowering("aten.arange.start", "aten.arange.start_step")
def _arange_start(
    ctx: LoweringContext,
    start: Scalar,
    end: Scalar,
    step: Scalar = 1,
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
) -> jax.Array:
    return _range(ctx, start, step)


@lowering("prims.iota.default")
def _iota(ctx: LoweringContext, length: int, *, start: int, step: int, dtype, device, requires_grad: bool) -> jax.Array:
    return _range(ctx, start, step)


@lowering("aten.linspace.default")
def _linspace(
    ctx: LoweringContext,
    start: Scalar,
    end: Scalar,
    steps: int,
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
) -> jax.Array:
    if kind(ctx.dtype) == "int":
        start, end = int(start), int(end)
    # From both ends, as torch does: exact at each. A constant of the program, so it is made here.
    index = np.arange(steps)
    step = (end - start) / max(steps - 1, 1)
    values = np.where(index <= (steps - 1) // 2, start + index * step, end - (steps - 1 - index) * step)
    return jnp.asarray(values.astype(np.int32 if kind(ctx.dtype) == "int" else np.float32))


@lowering("aten.eye.default", "aten.eye.m")
def _eye(
    ctx: LoweringContext, n: int, m: int | None = None, *, dtype=None, layout=None, device=None, pin_memory=None
) -> jax.Array:
    return jnp.eye(n, m, dtype=ctx.dtype)


@lowering("aten.tril_indices.default")
def _tril_indices(
    ctx: LoweringContext, row: int, col: int, offset: int = 0, *, dtype=None, layout=None, device=None, pin_memory=None
) -> jax.Array:
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)).astype(ctx.dtype))


@lowering("aten.triu_indices.default")
def _triu_indices(
    ctx: LoweringContext, row: int, col: int, offset: int = 0, *, dtype=None, layout=None, device=None, pin_memory=None
) -> jax.Array:
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)).astype(ctx.dtype))
