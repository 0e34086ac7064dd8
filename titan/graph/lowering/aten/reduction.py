"""Reductions and scans over dims. Narrow floats are accumulated in float32, as torch does."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from titan.graph.lowering.dtypes import Scalar, cast, compute_dtype
from titan.graph.lowering.table import LoweringContext, lowering

Dims = int | Sequence[int] | None


def reduced_dims(dim: Dims, num_dims: int) -> tuple[int, ...]:
    """The dims that a reduction removes, not negative: all for None or an empty list; none for a 0-dim tensor."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(num_dims))
    if num_dims == 0:
        return ()
    return tuple(d % num_dims for d in ([dim] if isinstance(dim, int) else dim))


def _num_reduced(x: jax.Array, dims: tuple[int, ...]) -> int:
    return math.prod(x.shape[d] for d in dims)


@lowering("aten.sum.default", "aten.sum.dim_IntList")
def _sum(ctx: LoweringContext, self: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype=None) -> jax.Array:
    if ctx.dtype == np.bool_:
        return jnp.any(self, axis=reduced_dims(dim, self.ndim), keepdims=keepdim)
    x = cast(self, ctx.compute_dtype)
    return jnp.sum(x, axis=reduced_dims(dim, x.ndim), keepdims=keepdim)


@lowering("aten.nansum.default")
def _nansum(ctx: LoweringContext, self: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype=None) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    return jnp.nansum(x, axis=reduced_dims(dim, x.ndim), keepdims=keepdim)


@lowering("aten.mean.default", "aten.mean.dim")
def _mean(ctx: LoweringContext, self: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype=None) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    dims = reduced_dims(dim, x.ndim)
    return jnp.sum(x, axis=dims, keepdims=keepdim) / np.float32(_num_reduced(x, dims))


@lowering("aten.prod.default", "aten.prod.dim_int")
def _prod(ctx: LoweringContext, self: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype=None) -> jax.Array:
    if ctx.dtype == np.bool_:
        return jnp.all(self, axis=reduced_dims(dim, self.ndim), keepdims=keepdim)
    x = cast(self, ctx.compute_dtype)
    return jnp.prod(x, axis=reduced_dims(dim, x.ndim), keepdims=keepdim)


@lowering("aten.any.default", "aten.any.dim", "aten.any.dims")
def _any(ctx: LoweringContext, self: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    x = self.astype(jnp.bool_)
    # Unlike all other reductions, any.dims and all.dims take an empty list to mean no dim at all.
    dims = () if isinstance(dim, Sequence) and not dim else reduced_dims(dim, x.ndim)
    return jnp.any(x, axis=dims, keepdims=keepdim)


@lowering("aten.all.default", "aten.all.dim", "aten.all.dims")
def _all(ctx: LoweringContext, self: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    x = self.astype(jnp.bool_)
    dims = () if isinstance(dim, Sequence) and not dim else reduced_dims(dim, x.ndim)
    return jnp.all(x, axis=dims, keepdims=keepdim)


@lowering("aten.amax.default")
def _amax(ctx: LoweringContext, self: jax.Array, dim: Dims = (), keepdim: bool = False) -> jax.Array:
    return jnp.max(self, axis=reduced_dims(dim, self.ndim), keepdims=keepdim)


@lowering("aten.amin.default")
def _amin(ctx: LoweringContext, self: jax.Array, dim: Dims = (), keepdim: bool = False) -> jax.Array:
    return jnp.min(self, axis=reduced_dims(dim, self.ndim), keepdims=keepdim)


@lowering("aten.aminmax.default")
def _aminmax(
    ctx: LoweringContext, self: jax.Array, *, dim: int | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    dims = reduced_dims(dim, self.ndim)
    return jnp.min(self, axis=dims, keepdims=keepdim), jnp.max(self, axis=dims, keepdims=keepdim)


@lowering("aten.max.default")
def _max(ctx: LoweringContext, self: jax.Array) -> jax.Array:
    return jnp.max(self)


@lowering("aten.min.default")
def _min(ctx: LoweringContext, self: jax.Array) -> jax.Array:
    return jnp.min(self)


def _arg(function: Callable[..., jax.Array], x: jax.Array, dim: int | None, keepdim: bool) -> jax.Array:
    if x.ndim == 0:
        return jnp.zeros((), np.int32)
    return function(x, axis=dim, keepdims=keepdim)


@lowering("aten.argmax.default")
def _argmax(ctx: LoweringContext, self: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    return _arg(jnp.argmax, self, dim, keepdim)


@lowering("aten.argmin.default")
def _argmin(ctx: LoweringContext, self: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    return _arg(jnp.argmin, self, dim, keepdim)


def _extremum(function: Callable[..., jax.Array], x: jax.Array, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), np.int32)
    indices = function(x, axis=dim, keepdims=True)
    values = jnp.take_along_axis(x, indices, axis=dim, mode="promise_in_bounds")
    return (values, indices) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(indices, dim))


@lowering("aten.max.dim")
def _max_dim(ctx: LoweringContext, self: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return _extremum(jnp.argmax, self, dim, keepdim)


@lowering("aten.min.dim")
def _min_dim(ctx: LoweringContext, self: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return _extremum(jnp.argmin, self, dim, keepdim)


@lowering("aten.logsumexp.default")
def _logsumexp(ctx: LoweringContext, self: jax.Array, dim: Dims, keepdim: bool = False) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    return jax.nn.logsumexp(x, axis=reduced_dims(dim, x.ndim), keepdims=keepdim)


def variance_and_mean(x: jax.Array, dims: tuple[int, ...], correction: Scalar | None) -> tuple[jax.Array, jax.Array]:
    """Variance and mean over `dims` (kept), in two passes; `correction` is subtracted from the count (None: 1)."""
    count = _num_reduced(x, dims)
    mean = jnp.sum(x, axis=dims, keepdims=True) / np.float32(count)
    divisor = max(count - (1 if correction is None else correction), 0)
    return jnp.sum(jnp.square(x - mean), axis=dims, keepdims=True) / np.float32(divisor), mean


def _variance_and_mean(
    ctx: LoweringContext, x: jax.Array, dim: Dims, correction: Scalar | None, keepdim: bool
) -> tuple[jax.Array, jax.Array]:
    x = cast(x, ctx.compute_dtype)
    dims = reduced_dims(dim, x.ndim)
    variance, mean = variance_and_mean(x, dims, correction)
    return (variance, mean) if keepdim else (jnp.squeeze(variance, dims), jnp.squeeze(mean, dims))


@lowering("aten.var.correction")
def _var(
    ctx: LoweringContext, self: jax.Array, dim: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False
) -> jax.Array:
    return _variance_and_mean(ctx, self, dim, correction, keepdim)[0]


@lowering("aten.std.correction")
def _std(
    ctx: LoweringContext, self: jax.Array, dim: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False
) -> jax.Array:
    return jnp.sqrt(_variance_and_mean(ctx, self, dim, correction, keepdim)[0])


@lowering("aten.var_mean.correction")
def _var_mean(
    ctx: LoweringContext, self: jax.Array, dim: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _variance_and_mean(ctx, self, dim, correction, keepdim)


@lowering("aten.std_mean.correction")
def _std_mean(
    ctx: LoweringContext, self: jax.Array, dim: Dims = None, *, correction: Scalar | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    variance, mean = _variance_and_mean(ctx, self, dim, correction, keepdim)
    return jnp.sqrt(variance), mean


@lowering("aten.linalg_vector_norm.default")
def _vector_norm(
    ctx: LoweringContext,
    self: jax.Array,
    ord: Scalar = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype=None,
) -> jax.Array:
    return vector_norm(cast(self, ctx.compute_dtype), ord, reduced_dims(dim, self.ndim), keepdim)


@lowering("aten.norm.Scalar", "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype", "aten.norm.ScalarOpt_dtype")
def _norm(
    ctx: LoweringContext, self: jax.Array, p: Scalar | None = 2, dim: Dims = None, keepdim: bool = False, *, dtype=None
) -> jax.Array:
    return vector_norm(cast(self, ctx.compute_dtype), 2 if p is None else p, reduced_dims(dim, self.ndim), keepdim)


def vector_norm(x: jax.Array, order: Scalar, dims: tuple[int, ...], keepdim: bool) -> jax.Array:
    """The p-norm over `dims` for p = `order`, which may be 0 (count of nonzeros) or infinite."""
    magnitude = jnp.abs(x)
    if order == 2:
        return jnp.sqrt(jnp.sum(jnp.square(x), axis=dims, keepdims=keepdim))
    if order == 1:
        return jnp.sum(magnitude, axis=dims, keepdims=keepdim)
    if order == 0:
        return jnp.sum((x != 0).astype(x.dtype), axis=dims, keepdims=keepdim)
    if order == math.inf:
        return jnp.max(magnitude, axis=dims, keepdims=keepdim)
    if order == -math.inf:
        return jnp.min(magnitude, axis=dims, keepdims=keepdim)
    return jnp.power(jnp.sum(jnp.power(magnitude, order), axis=dims, keepdims=keepdim), 1.0 / order)


def _scan(name: str, function: Callable[..., jax.Array]) -> None:
    @lowering(f"aten.{name}.default")
    def lower_scan(ctx: LoweringContext, self: jax.Array, dim: int, *, dtype=None) -> jax.Array:
        x = cast(self, ctx.compute_dtype)
        return function(x, axis=dim % x.ndim) if x.ndim else x


_scan("cumsum", lax.cumsum)
_scan("cumprod", lax.cumprod)


@lowering("aten.logcumsumexp.default")
def _logcumsumexp(ctx: LoweringContext, self: jax.Array, dim: int) -> jax.Array:
    x = cast(self, compute_dtype(self.dtype))
    return lax.cumlogsumexp(x, axis=dim % x.ndim) if x.ndim else x


@lowering("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def _count_nonzero(ctx: LoweringContext, self: jax.Array, dim: Dims = None) -> jax.Array:
    return jnp.sum(self.astype(np.bool_).astype(np.int32), axis=reduced_dims(dim, self.ndim))
