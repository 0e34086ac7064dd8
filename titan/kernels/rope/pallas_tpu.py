"""The rotation as a Pallas TPU kernel that reads each element once and writes it where attention wants it.

A block is some tokens of one head: 128 columns of the projection's result, so that the move of the head dim outwards is
done by the copies into and out of VMEM. The pair of an element lies half a head away, one rotation of the lanes; an
adjacent one lies to the right of even lanes and to the left of odd ones, a choice between two rotations.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
_MAX_BLOCK_TOKENS = 1024
_SUBLANES = 16  # of a bfloat16 register


def rotate(x_BTF: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array, *, adjacent_pairs: bool) -> jax.Array:
    """[B, T, N D] to [B, N, T, D], pairs (i, i + D / 2) or adjacent ones rotated; D is a multiple of 128."""
    return _call(x_BTF, cos_BTH, sin_BTH, adjacent_pairs, to_heads=True)


def rotate_back(grad_BNTD: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array, *, adjacent_pairs: bool) -> jax.Array:
    """The gradient of `rotate`: [B, N, T, D] to [B, T, N D], rotated the other way."""
    return _call(grad_BNTD, cos_BTH, -sin_BTH, adjacent_pairs, to_heads=False)


def vmem_bytes(length: int, head_dim: int, itemsize: int) -> int:
    """What the blocks take of VMEM, two buffers of each: the largest heads in use (256) need 8 MiB in float32."""
    return 2 * _block_tokens(length) * head_dim * (2 * itemsize + 2 * 4)


def _block_tokens(length: int) -> int:
    return min(_MAX_BLOCK_TOKENS, -(-length // _SUBLANES) * _SUBLANES)


def _call(x: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array, adjacent_pairs: bool, *, to_heads: bool) -> jax.Array:
    batch, length, half = cos_BTH.shape
    head_dim = 2 * half
    num_heads = x.size // (batch * length * head_dim)
    tokens = _block_tokens(length)
    columns = pl.BlockSpec((1, tokens, head_dim), lambda b, t, n: (b, t, n))
    heads = pl.BlockSpec((1, None, tokens, head_dim), lambda b, t, n: (b, n, t, 0))
    angles = pl.BlockSpec((1, tokens, head_dim), lambda b, t, n: (b, t, 0))  # fetched once for all heads
    shape = (batch, num_heads, length, head_dim) if to_heads else (batch, length, num_heads * head_dim)
    num_bytes = 2 * x.size * x.dtype.itemsize + 2 * 4 * batch * length * head_dim
    spread = _interleaved if adjacent_pairs else _side_by_side
    return pl.pallas_call(
        functools.partial(_kernel, adjacent_pairs=adjacent_pairs),
        grid=(batch, -(-length // tokens), num_heads),
        in_specs=[columns if to_heads else heads, angles, angles],
        out_specs=heads if to_heads else columns,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=3 * x.size, transcendentals=0, bytes_accessed=num_bytes),
        name="rotate_heads" if to_heads else "rotate_heads_back",
    )(x, spread(cos_BTH, cos_BTH), spread(-sin_BTH, sin_BTH))


def _side_by_side(first_BTH: jax.Array, second_BTH: jax.Array) -> jax.Array:
    return jnp.concatenate([first_BTH, second_BTH], axis=-1)


def _interleaved(first_BTH: jax.Array, second_BTH: jax.Array) -> jax.Array:
    return jnp.stack([first_BTH, second_BTH], axis=-1).reshape(*first_BTH.shape[:2], -1)


def _kernel(x_ref, cos_ref, sin_ref, out_ref, *, adjacent_pairs):
    # all of them: (1, tokens, head dim); sin has the sign of each pair's first element turned
    x = x_ref[...].astype(jnp.float32)
    head_dim = x.shape[-1]
    if adjacent_pairs:
        is_first = lax.broadcasted_iota(jnp.int32, x.shape, 2) % 2 == 0
        pair = jnp.where(is_first, pltpu.roll(x, head_dim - 1, axis=2), pltpu.roll(x, 1, axis=2))
    else:
        pair = pltpu.roll(x, head_dim // 2, axis=2)
    out_ref[...] = (x * cos_ref[...] + pair * sin_ref[...]).astype(out_ref.dtype)
