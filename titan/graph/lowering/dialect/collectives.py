"""Collectives over mesh axes: the group name of a functional collective in the graph is the name of a mesh axis."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from titan.graph.lowering.dtypes import cast
from titan.graph.lowering.table import LoweringContext, lowering


def _reduce(x: jax.Array, reduce_op: str, axis_name: str) -> jax.Array:
    match reduce_op.lower():
        case "sum":
            return lax.psum(x, axis_name)
        case "avg":
            return lax.psum(x, axis_name) / cast(lax.axis_size(axis_name), x.dtype)
        case "max":
            return lax.pmax(x, axis_name)
        case "min":
            return lax.pmin(x, axis_name)
        case "product":
            return jnp.prod(lax.all_gather(x, axis_name), axis=0)
    raise NotImplementedError(f"reduce op {reduce_op!r}: known are sum, avg, max, min, product")


@lowering("_c10d_functional.all_reduce.default")
def _all_reduce(ctx: LoweringContext, input: jax.Array, reduce_op: str, group_name: str) -> jax.Array:
    return _reduce(input, reduce_op, group_name)


@lowering("_c10d_functional.all_reduce_coalesced.default")
def _all_reduce_coalesced(
    ctx: LoweringContext, inputs: Sequence[jax.Array], reduce_op: str, group_name: str
) -> tuple[jax.Array, ...]:
    return tuple(_reduce(x, reduce_op, group_name) for x in inputs)


def _all_gather(x: jax.Array, axis_name: str) -> jax.Array:
    return lax.all_gather(x, axis_name, tiled=True)


@lowering("_c10d_functional.all_gather_into_tensor.default")
def _all_gather_into_tensor(ctx: LoweringContext, input: jax.Array, group_size: int, group_name: str) -> jax.Array:
    return _all_gather(input, group_name)


@lowering("_c10d_functional.all_gather_into_tensor_coalesced.default")
def _all_gather_into_tensor_coalesced(
    ctx: LoweringContext, inputs: Sequence[jax.Array], group_size: int, group_name: str
) -> tuple[jax.Array, ...]:
    return tuple(_all_gather(x, group_name) for x in inputs)


def _reduce_scatter(x: jax.Array, reduce_op: str, axis_name: str) -> jax.Array:
    size = lax.axis_size(axis_name)
    if reduce_op.lower() in ("sum", "avg"):
        total = lax.psum_scatter(x, axis_name, scatter_dimension=0, tiled=True)
        return total / cast(size, x.dtype) if reduce_op.lower() == "avg" else total
    # XLA scatters sums only. The other reductions exchange the shards and reduce them here.
    shards = lax.all_to_all(x.reshape(size, x.shape[0] // size, *x.shape[1:]), axis_name, 0, 0)
    match reduce_op.lower():
        case "max":
            return jnp.max(shards, axis=0)
        case "min":
            return jnp.min(shards, axis=0)
        case "product":
            return jnp.prod(shards, axis=0)
    raise NotImplementedError(f"reduce op {reduce_op!r}: known are sum, avg, max, min, product")


@lowering("_c10d_functional.reduce_scatter_tensor.default")
def _reduce_scatter_tensor(
    ctx: LoweringContext,
    input: jax.Array,
    reduce_op: str,
    group_size: int,
    group_name: str,
) -> jax.Array:
    return _reduce_scatter(input, reduce_op, group_name)


@lowering("_c10d_functional.reduce_scatter_tensor_coalesced.default")
def _reduce_scatter_tensor_coalesced(
    ctx: LoweringContext, inputs: Sequence[jax.Array], reduce_op: str, group_size: int, group_name: str
) -> tuple[jax.Array, ...]:
    return tuple(_reduce_scatter(x, reduce_op, group_name) for x in inputs)


@lowering("titan.all_gather_along.default")
def _all_gather_along(ctx: LoweringContext, x: jax.Array, dim: int, group_size: int, group_name: str) -> jax.Array:
    return lax.all_gather(x, group_name, axis=dim, tiled=True)


@lowering("titan.reduce_scatter_along.default")
def _reduce_scatter_along(ctx: LoweringContext, x: jax.Array, dim: int, group_size: int, group_name: str) -> jax.Array:
    return lax.psum_scatter(x, group_name, scatter_dimension=dim, tiled=True)


@lowering("_c10d_functional.all_to_all_single.default")
def _all_to_all_single(
    ctx: LoweringContext,
    input: jax.Array,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    group_name: str,
) -> jax.Array:
    if len({*output_split_sizes, *input_split_sizes}) > 1:
        raise NotImplementedError(
            f"all_to_all_single with unequal splits {list(input_split_sizes)} -> {list(output_split_sizes)}: "
            "shapes must be the same on all devices; pad the splits to one size"
        )
    return lax.all_to_all(input, group_name, split_axis=0, concat_axis=0, tiled=True)


@lowering("_c10d_functional.broadcast.default")
def _broadcast(ctx: LoweringContext, input: jax.Array, src: int, group_name: str) -> jax.Array:
    mine = lax.axis_index(group_name) == src
    return lax.psum(jnp.where(mine, input, jnp.zeros_like(input)), group_name)


@lowering("_c10d_functional.wait_tensor.default")
def _wait_tensor(ctx: LoweringContext, tensor: jax.Array) -> jax.Array:
    return tensor  # XLA places the start and the end of every collective


@lowering("titan.axis_index.default")
def _axis_index(ctx: LoweringContext, group_name: str) -> jax.Array:
    return lax.axis_index(group_name)
