"""Reading and writing parts of tensors: slices, gathers, scatters, embedding, sort and top-k.

torch raises for an index out of range; a compiled program cannot. An embedding row out of range reads as NaN, so that
it shows in the loss; other reads are clamped and other writes are dropped.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from titan.graph.lowering.dtypes import Scalar, cast, compute_dtype
from titan.graph.lowering.table import LoweringContext, lowering


@lowering("aten.embedding.default")
def _embedding(
    ctx: LoweringContext,
    weight: jax.Array,  # (num_rows, width)
    indices: jax.Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    return weight.at[indices].get(mode="fill", wrap_negative_indices=False)


@lowering("aten.embedding_dense_backward.default")
def _embedding_dense_backward(
    ctx: LoweringContext,
    grad_output: jax.Array,  # (*indices.shape, width)
    indices: jax.Array,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> jax.Array:
    grad = cast(grad_output, ctx.compute_dtype).reshape(-1, grad_output.shape[-1])
    rows = indices.reshape(-1)
    if scale_grad_by_freq:
        counts = jnp.zeros(num_weights, np.int32).at[rows].add(1)
        grad = grad / counts[rows].astype(grad.dtype)[:, None]
    if 0 <= padding_idx < num_weights:
        rows = jnp.where(rows == padding_idx, num_weights, rows)  # out of range: dropped
    in_order = ctx.platform == "tpu"
    if in_order:
        # XLA:TPU adds sorted rows in place, else into a second copy of the whole gradient.
        rows, order = lax.sort((rows, lax.iota(np.int32, len(rows))), num_keys=1)
        grad = grad[order]
    zeros = jnp.zeros(ctx.shape, grad.dtype)
    return zeros.at[rows].add(grad, mode="drop", wrap_negative_indices=False, indices_are_sorted=in_order)


@lowering("aten.slice.Tensor")
def _slice_tensor(
    ctx: LoweringContext, self: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    dim %= self.ndim
    start, end, _ = slice(start, end, step).indices(self.shape[dim])
    return lax.slice_in_dim(self, start, max(start, end), step, axis=dim)


@lowering("aten.slice_scatter.default")
def _slice_scatter(
    ctx: LoweringContext,
    self: jax.Array,
    src: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    dim %= self.ndim
    first, last, _ = slice(start, end, step).indices(self.shape[dim])
    src = cast(src, self.dtype)
    if step == 1:
        return lax.dynamic_update_slice_in_dim(self, src, first, dim) if last > first else self
    return self.at[(slice(None),) * dim + (slice(first, last, step),)].set(src)


@lowering("aten.slice_backward.default")
def _slice_backward(
    ctx: LoweringContext, grad_output: jax.Array, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> jax.Array:
    dim %= len(ctx.shape)
    size, length = ctx.shape[dim], grad_output.shape[dim]
    if length == 0:
        return jnp.zeros(ctx.shape, ctx.dtype)
    first = slice(start, end, step).indices(size)[0]
    config = [(0, 0, 0)] * len(ctx.shape)
    config[dim] = (first, size - first - (length - 1) * step - 1, step - 1)
    return lax.pad(grad_output, grad_output.dtype.type(0), config)


@lowering("aten.select.int")
def _select(ctx: LoweringContext, self: jax.Array, dim: int, index: int) -> jax.Array:
    return lax.index_in_dim(self, index, axis=dim, keepdims=False)


@lowering("aten.select_scatter.default")
def _select_scatter(ctx: LoweringContext, self: jax.Array, src: jax.Array, dim: int, index: int) -> jax.Array:
    dim, index = dim % self.ndim, index % self.shape[dim]
    return lax.dynamic_update_slice_in_dim(self, jnp.expand_dims(cast(src, self.dtype), dim), index, dim)


@lowering("aten.select_backward.default")
def _select_backward(
    ctx: LoweringContext, grad_output: jax.Array, input_sizes: Sequence[int], dim: int, index: int
) -> jax.Array:
    dim, size = dim % len(ctx.shape), ctx.shape[dim]
    index %= size
    config = [(0, 0, 0)] * len(ctx.shape)
    config[dim] = (index, size - index - 1, 0)
    return lax.pad(jnp.expand_dims(grad_output, dim), grad_output.dtype.type(0), config)


@lowering("aten.narrow_copy.default")
def _narrow(ctx: LoweringContext, self: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    first = start + self.shape[dim] if start < 0 else start
    return lax.slice_in_dim(self, first, first + length, axis=dim % self.ndim)


@lowering("aten.unfold.default", "aten.unfold_copy.default")
def _unfold(ctx: LoweringContext, self: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    x = self.reshape(1) if self.ndim == 0 else self
    dim = dimension % x.ndim
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=dim, mode="clip")
    return jnp.moveaxis(windows, dim + 1, -1).reshape(ctx.shape)


@lowering("aten.index_select.default")
def _index_select(ctx: LoweringContext, self: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    if self.ndim == 0:
        return self
    return jnp.take(self, index.reshape(-1), axis=dim, mode="clip")


def _crop(x: jax.Array, sizes: Sequence[int], dim: int) -> jax.Array:
    """`x` cut to `sizes` in every dim but `dim`: a gather reads only where the index tensor reaches."""
    limits = [size if d != dim else x.shape[d] for d, size in enumerate(sizes)]
    return x if tuple(limits) == x.shape else lax.slice(x, [0] * x.ndim, limits)


@lowering("aten.gather.default")
def _gather(
    ctx: LoweringContext, self: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False
) -> jax.Array:
    if index.size == 0:
        return jnp.zeros(ctx.shape, self.dtype)
    if self.ndim == 0 or index.ndim == 0:
        return jnp.reshape(self.reshape(-1)[index.reshape(-1)], ctx.shape)
    dim %= self.ndim
    return jnp.take_along_axis(_crop(self, index.shape, dim), index, axis=dim, mode="clip")


def _scattered(self: jax.Array, dim: int, index: jax.Array, src: jax.Array | Scalar, method: str) -> jax.Array:
    """`self.at[...].method(src)` at the positions that `index` names along `dim`."""
    if self.ndim == 0 or index.ndim == 0:
        src = src.reshape(-1) if isinstance(src, jax.Array) else src
        flat = _scattered(self.reshape(-1), 0, index.reshape(-1), src, method)
        return flat.reshape(self.shape)
    if index.size == 0:
        return self
    if self.dtype == np.bool_ and method != "set":
        # XLA has no bool scatter with a combiner: in integers, where a sum or a product is true if it is not 0.
        src = src.astype(np.int32) if isinstance(src, jax.Array) else int(src)
        method = {"add": "max", "multiply": "min"}.get(method, method)
        return _scattered(self.astype(np.int32), dim, index, src, method).astype(np.bool_)
    dim %= self.ndim
    if isinstance(src, jax.Array):
        src = lax.slice(src, [0] * src.ndim, index.shape)
    where = [lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(self.ndim)]
    where[dim] = index
    return getattr(self.at[tuple(where)], method)(cast(src, self.dtype))


@lowering("aten.scatter.src")
def _scatter_src(ctx: LoweringContext, self: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return _scattered(self, dim, index, src, "set")


@lowering("aten.scatter.value")
def _scatter_value(ctx: LoweringContext, self: jax.Array, dim: int, index: jax.Array, value: Scalar) -> jax.Array:
    return _scattered(self, dim, index, value, "set")


@lowering("aten.scatter.reduce")
def _scatter_with_reduce(
    ctx: LoweringContext, self: jax.Array, dim: int, index: jax.Array, src: jax.Array, *, reduce: str
) -> jax.Array:
    return _scattered(self, dim, index, src, "add" if reduce == "add" else "multiply")


@lowering("aten.scatter.value_reduce")
def _scatter_value_reduce(
    ctx: LoweringContext, self: jax.Array, dim: int, index: jax.Array, value: Scalar, *, reduce: str
) -> jax.Array:
    return _scattered(self, dim, index, value, "add" if reduce == "add" else "multiply")


@lowering("aten.scatter_add.default")
def _scatter_add(ctx: LoweringContext, self: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return _scattered(cast(self, ctx.compute_dtype), dim, index, src, "add")


@lowering("aten.scatter_reduce.two")
def _scatter_reduce(
    ctx: LoweringContext,
    self: jax.Array,
    dim: int,
    index: jax.Array,
    src: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    x = cast(self, ctx.compute_dtype)
    if not include_self:
        x = _scattered(x, dim, index, _reduce_identity(reduce, x.dtype), "set")
    if reduce != "mean":
        return _scattered(x, dim, index, src, {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min"}[reduce])
    total = _scattered(x, dim, index, src, "add")
    counts = jnp.full(x.shape, 1 if include_self else 0, np.int32)
    counts = jnp.maximum(_scattered(counts, dim, index, 1, "add"), 1).astype(x.dtype)
    return jnp.floor_divide(total, counts) if jnp.issubdtype(x.dtype, jnp.integer) else total / counts


def _reduce_identity(reduce: str, dtype: np.dtype) -> Scalar:
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype == np.bool_:
        return reduce == "amin"
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return int(limits.min if reduce == "amax" else limits.max)
    return -np.inf if reduce == "amax" else np.inf


def _at_dim(x: jax.Array, dim: int, index: jax.Array) -> tuple[slice | jax.Array, ...]:
    return (slice(None),) * (dim % x.ndim) + (index.reshape(-1),)


@lowering("aten.index_add.default")
def _index_add(
    ctx: LoweringContext, self: jax.Array, dim: int, index: jax.Array, source: jax.Array, *, alpha: Scalar = 1
) -> jax.Array:
    x = self.astype(np.int32) if self.dtype == np.bool_ else cast(self, ctx.compute_dtype)
    source = cast(source, x.dtype)
    source = source if alpha == 1 else source * cast(alpha, x.dtype)
    result = x + jnp.sum(source) if x.ndim == 0 else x.at[_at_dim(x, dim, index)].add(source)
    return result.astype(np.bool_) if self.dtype == np.bool_ else result


@lowering("aten.index_copy.default")
def _index_copy(ctx: LoweringContext, self: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    if self.ndim == 0:
        return source.reshape(())
    return self.at[_at_dim(self, dim, index)].set(source)


@lowering("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def _index_fill(
    ctx: LoweringContext, self: jax.Array, dim: int, index: jax.Array, value: jax.Array | Scalar
) -> jax.Array:
    value = cast(value, self.dtype)
    if self.ndim == 0:
        return jnp.reshape(value, ()) if index.size else self
    return self.at[_at_dim(self, dim, index)].set(value)


Indices = Sequence[jax.Array | None]


def _check_no_mask(indices: Indices) -> None:
    if any(index is not None and index.dtype in (np.bool_, np.uint8) for index in indices):
        raise NotImplementedError("indexing by a bool mask has a shape that depends on data; use torch.where")


def _numpy_index(indices: Indices) -> tuple[slice | jax.Array, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


@lowering("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(ctx: LoweringContext, self: jax.Array, indices: Indices) -> jax.Array:
    _check_no_mask(indices)
    return self[_numpy_index(indices)]


@lowering("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(
    ctx: LoweringContext, self: jax.Array, indices: Indices, values: jax.Array, accumulate: bool = False
) -> jax.Array:
    values = cast(values, self.dtype)
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == np.bool_ and values.size == 1:
        # The one mask whose shape does not depend on data: every chosen element gets the same value.
        mask = indices[0].reshape(indices[0].shape + (1,) * (self.ndim - indices[0].ndim))
        value = values.reshape(())
        return jnp.where(mask, self + value if accumulate else value, self)
    _check_no_mask(indices)
    where = _numpy_index(indices)
    if not accumulate:
        return self.at[where].set(values)
    if self.dtype == np.bool_:
        return self.astype(np.int32).at[where].max(values.astype(np.int32)).astype(np.bool_)
    target = cast(self, compute_dtype(self.dtype))
    return target.at[where].add(cast(values, target.dtype))


@lowering("aten.take.default")
def _take(ctx: LoweringContext, self: jax.Array, index: jax.Array) -> jax.Array:
    return self.reshape(-1)[index]


@lowering("aten.masked_scatter.default")
def _masked_scatter(ctx: LoweringContext, self: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    # The k-th chosen element takes the k-th element of the source.
    x = jnp.broadcast_to(self, ctx.shape).reshape(-1)
    mask = jnp.broadcast_to(mask, ctx.shape).reshape(-1)
    order = jnp.cumsum(mask.astype(np.int32)) - 1
    chosen = source.reshape(-1)[jnp.maximum(order, 0)] if source.size else x
    return jnp.where(mask, chosen, x).reshape(ctx.shape)


def _sort_indices(x: jax.Array, dim: int, descending: bool) -> jax.Array:
    # NaN counts as the largest, and equal elements keep their order in both directions.
    return jnp.argsort(x, axis=dim, stable=True, descending=descending)


def _sorted(x: jax.Array, dim: int, descending: bool) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), np.int32)
    indices = _sort_indices(x, dim, descending)
    return jnp.take_along_axis(x, indices, axis=dim, mode="promise_in_bounds"), indices


@lowering("aten.sort.default")
def _sort(
    ctx: LoweringContext, self: jax.Array, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _sorted(self, dim, descending)


@lowering("aten.sort.stable")
def _sort_stable(
    ctx: LoweringContext, self: jax.Array, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _sorted(self, dim, descending)


@lowering("aten.argsort.stable")
def _argsort(
    ctx: LoweringContext, self: jax.Array, *, stable: bool, dim: int = -1, descending: bool = False
) -> jax.Array:
    return _sorted(self, dim, descending)[1]


@lowering("aten.topk.default")
def _topk(
    ctx: LoweringContext,
    self: jax.Array,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[jax.Array, jax.Array]:
    if self.ndim == 0:
        return (self, jnp.zeros((), np.int32)) if k else (self[:0], jnp.zeros((0,), np.int32))
    if largest:
        return lax.top_k(self, k, axis=dim % self.ndim)
    values, indices = _sorted(self, dim, descending=False)
    return (
        lax.slice_in_dim(values, 0, k, axis=dim % self.ndim),
        lax.slice_in_dim(indices, 0, k, axis=dim % self.ndim),
    )


@lowering("aten.searchsorted.Tensor")
def _searchsorted(
    ctx: LoweringContext,
    sorted_sequence: jax.Array,
    self: jax.Array,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, axis=-1)
    if 0 in ctx.shape or not sorted_sequence.size:
        return jnp.zeros(ctx.shape, ctx.dtype)
    side = side or ("right" if right else "left")
    if sorted_sequence.ndim == 1:
        return jnp.searchsorted(sorted_sequence, self, side=side)
    rows = sorted_sequence.reshape(-1, sorted_sequence.shape[-1])
    queries = self.reshape(rows.shape[0], self.shape[-1])
    return jax.vmap(lambda row, query: jnp.searchsorted(row, query, side=side))(rows, queries).reshape(ctx.shape)


@lowering("aten.bucketize.Tensor")
def _bucketize(
    ctx: LoweringContext, self: jax.Array, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False
) -> jax.Array:
    return jnp.searchsorted(boundaries, self, side="right" if right else "left")
