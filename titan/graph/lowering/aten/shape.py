"""Ops that rearrange, copy or convert elements without arithmetic."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from titan.graph.lowering.dtypes import Scalar, cast
from titan.graph.lowering.table import LoweringContext, lowering


@lowering(
    "aten.alias.default",
    "aten.clone.default",
    "aten.detach.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.alias_copy.default",
)
def _identity(ctx: LoweringContext, self: jax.Array, *, memory_format=None) -> jax.Array:
    return self


@lowering("aten._to_copy.default")
def _to_copy(
    ctx: LoweringContext,
    self: jax.Array,
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
    non_blocking=False,
    memory_format=None,
) -> jax.Array:
    return cast(self, ctx.dtype)


@lowering("prims.convert_element_type.default")
def _convert_element_type(ctx: LoweringContext, a: jax.Array, dtype) -> jax.Array:
    return cast(a, ctx.dtype)


@lowering("aten.copy.default")
def _copy(ctx: LoweringContext, self: jax.Array, src: jax.Array, non_blocking: bool = False) -> jax.Array:
    return jnp.broadcast_to(cast(src, ctx.dtype), ctx.shape)


@lowering("aten.view.default", "aten._unsafe_view.default", "aten.view_copy.default")
def _view(ctx: LoweringContext, self: jax.Array, size: Sequence[int]) -> jax.Array:
    return jnp.reshape(self, ctx.shape)


@lowering("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def _squeeze(ctx: LoweringContext, self: jax.Array, dim: int | Sequence[int] | None = None) -> jax.Array:
    return jnp.reshape(self, ctx.shape)


@lowering("aten.unsqueeze.default")
def _unsqueeze(ctx: LoweringContext, self: jax.Array, dim: int) -> jax.Array:
    return jnp.expand_dims(self, dim)


@lowering("aten.expand.default", "aten.expand_copy.default")
def _expand(ctx: LoweringContext, self: jax.Array, size: Sequence[int], *, implicit: bool = False) -> jax.Array:
    return jnp.broadcast_to(self, ctx.shape)


@lowering("aten.t.default", "aten.t_copy.default")
def _t(ctx: LoweringContext, self: jax.Array) -> jax.Array:
    return lax.transpose(self, (1, 0)) if self.ndim == 2 else self


@lowering("aten.transpose.int", "aten.transpose_copy.int")
def _transpose(ctx: LoweringContext, self: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(self, dim0, dim1) if self.ndim else self


@lowering("aten.permute.default", "aten.permute_copy.default")
def _permute(ctx: LoweringContext, self: jax.Array, dims: Sequence[int]) -> jax.Array:
    return lax.transpose(self, tuple(d % self.ndim for d in dims))


@lowering("aten.cat.default")
def _cat(ctx: LoweringContext, tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    # torch lets a 1-dim tensor without elements be concatenated with anything.
    parts = [cast(tensor, ctx.dtype) for tensor in tensors if tensor.shape != (0,) or len(ctx.shape) == 1]
    if not parts:
        return jnp.zeros(ctx.shape, ctx.dtype)
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, dim % len(ctx.shape))


@lowering("aten.stack.default")
def _stack(ctx: LoweringContext, tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    return jnp.stack([cast(tensor, ctx.dtype) for tensor in tensors], axis=dim)


def _split_at(self: jax.Array, sizes: Sequence[int], dim: int) -> tuple[jax.Array, ...]:
    return tuple(lax.split(self, sizes, dim % self.ndim))


@lowering("aten.split.Tensor", "aten.unsafe_split.Tensor")
def _split(ctx: LoweringContext, self: jax.Array, split_size: int, dim: int = 0) -> tuple[jax.Array, ...]:
    return _split_at(self, [meta.shape[dim] for meta in ctx.out], dim)


@lowering("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default")
def _split_with_sizes(
    ctx: LoweringContext, self: jax.Array, split_sizes: Sequence[int], dim: int = 0
) -> tuple[jax.Array, ...]:
    return _split_at(self, split_sizes, dim)


@lowering("aten.unbind.int", "aten.unbind_copy.int")
def _unbind(ctx: LoweringContext, self: jax.Array, dim: int = 0) -> tuple[jax.Array, ...]:
    return tuple(lax.index_in_dim(self, i, axis=dim % self.ndim, keepdims=False) for i in range(self.shape[dim]))


@lowering("aten.repeat.default")
def _repeat(ctx: LoweringContext, self: jax.Array, repeats: Sequence[int]) -> jax.Array:
    return jnp.tile(self, tuple(repeats))


@lowering("aten.flip.default")
def _flip(ctx: LoweringContext, self: jax.Array, dims: Sequence[int]) -> jax.Array:
    return lax.rev(self, tuple(d % self.ndim for d in dims)) if self.ndim else self


@lowering("aten.roll.default")
def _roll(ctx: LoweringContext, self: jax.Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> jax.Array:
    if not dims:
        return jnp.reshape(jnp.roll(jnp.ravel(self), shifts[0]), self.shape)
    return jnp.roll(self, tuple(shifts), tuple(dims))


@lowering("aten.rot90.default")
def _rot90(ctx: LoweringContext, self: jax.Array, k: int = 1, dims: Sequence[int] = (0, 1)) -> jax.Array:
    return jnp.rot90(self, k, tuple(dims))


@lowering("aten.constant_pad_nd.default")
def _constant_pad(ctx: LoweringContext, self: jax.Array, pad: Sequence[int], value: Scalar = 0) -> jax.Array:
    # torch lists (low, high) from the last dim backwards; negative numbers cut.
    pairs = [(pad[i], pad[i + 1], 0) for i in range(0, len(pad), 2)]
    config = [(0, 0, 0)] * (self.ndim - len(pairs)) + pairs[::-1]
    return lax.pad(self, cast(value, self.dtype), config)


def _mirrored(name: str, num_dims: int, mode: str) -> None:
    @lowering(f"aten.{name}{num_dims}d.default")
    def lower_pad(ctx: LoweringContext, self: jax.Array, padding: Sequence[int]) -> jax.Array:
        pairs = [(padding[i], padding[i + 1]) for i in range(0, 2 * num_dims, 2)][::-1]
        lead = self.ndim - num_dims
        padded = jnp.pad(self, [(0, 0)] * lead + [(max(low, 0), max(high, 0)) for low, high in pairs], mode=mode)
        kept = (
            slice(max(-low, 0), size - max(-high, 0))
            for size, (low, high) in zip(padded.shape[lead:], pairs, strict=True)
        )
        return padded[(Ellipsis, *kept)]


for _num_dims in (1, 2, 3):
    _mirrored("reflection_pad", _num_dims, "reflect")
    _mirrored("replication_pad", _num_dims, "edge")


@lowering("aten.pixel_shuffle.default")
def _pixel_shuffle(ctx: LoweringContext, self: jax.Array, upscale_factor: int) -> jax.Array:
    *batch, channels, height, width = self.shape
    r = upscale_factor
    x = self.reshape(*batch, channels // (r * r), r, r, height, width)
    b = len(batch)
    return x.transpose(*range(b), b, b + 3, b + 1, b + 4, b + 2).reshape(ctx.shape)


@lowering("aten.pixel_unshuffle.default")
def _pixel_unshuffle(ctx: LoweringContext, self: jax.Array, downscale_factor: int) -> jax.Array:
    *batch, channels, height, width = self.shape
    r = downscale_factor
    x = self.reshape(*batch, channels, height // r, r, width // r, r)
    b = len(batch)
    return x.transpose(*range(b), b, b + 2, b + 4, b + 1, b + 3).reshape(ctx.shape)


@lowering("aten.view.dtype")
def _view_dtype(ctx: LoweringContext, self: jax.Array, dtype) -> jax.Array:
    old, new = self.dtype.itemsize, ctx.dtype.itemsize
    if new > old:
        self = self.reshape(*self.shape[:-1], -1, new // old)
    return lax.bitcast_convert_type(self, ctx.dtype).reshape(ctx.shape)


@lowering("aten.view_as_complex.default")
def _view_as_complex(ctx: LoweringContext, self: jax.Array) -> jax.Array:
    return lax.complex(self[..., 0], self[..., 1])


@lowering("aten.view_as_real.default")
def _view_as_real(ctx: LoweringContext, self: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(self), jnp.imag(self)], axis=-1)


@lowering("aten.tril.default")
def _tril(ctx: LoweringContext, self: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.tril(self, diagonal)


@lowering("aten.triu.default")
def _triu(ctx: LoweringContext, self: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.triu(self, diagonal)


def _diagonal_indices(shape: Sequence[int], offset: int, dim1: int, dim2: int) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = shape[dim1], shape[dim2]
    first_row, first_column = max(-offset, 0), max(offset, 0)
    steps = np.arange(max(min(rows - first_row, columns - first_column), 0))
    return first_row + steps, first_column + steps


@lowering("aten.diagonal.default", "aten.diagonal_copy.default")
def _diagonal(ctx: LoweringContext, self: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    return jnp.diagonal(self, offset, dim1, dim2)


@lowering("aten.diagonal_scatter.default")
def _diagonal_scatter(
    ctx: LoweringContext, self: jax.Array, src: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    moved = jnp.moveaxis(self, (dim1, dim2), (-2, -1))
    rows, columns = _diagonal_indices(moved.shape, offset, -2, -1)
    return jnp.moveaxis(moved.at[..., rows, columns].set(cast(src, self.dtype)), (-2, -1), (dim1, dim2))


@lowering("aten.diagonal_backward.default")
def _diagonal_backward(
    ctx: LoweringContext, grad_output: jax.Array, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> jax.Array:
    return _diagonal_scatter(ctx, jnp.zeros(ctx.shape, ctx.dtype), grad_output, offset, dim1, dim2)


@lowering("aten.diag_embed.default")
def _diag_embed(ctx: LoweringContext, self: jax.Array, offset: int = 0, dim1: int = -2, dim2: int = -1) -> jax.Array:
    return _diagonal_scatter(ctx, jnp.zeros(ctx.shape, ctx.dtype), self, offset, dim1, dim2)
