"""The rotation as a Pallas TPU kernel that reads each element once and writes it where attention wants it.

A block is some tokens of one head: 128 columns of the projection's result, so that the move of the head dim outwards is
done by the copies into and out of VMEM. The pair of an element lies half a head away, one rotation of the lanes.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
_MAX_BLOCK_TOKENS = 1024
_SUBLANES = 16  # of a bfloat16 register


def rotate(x_BTF: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
    """[B, T, N D] to [B, N, T, D], each pair (i, i + D / 2) rotated; D is a multiple of 128."""
    return _call(x_BTF, cos_BTH, sin_BTH, to_heads=True)


def rotate_back(grad_BNTD: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
    """The gradient of `rotate`: [B, N, T, D] to [B, T, N D], rotated the other way."""
    return _call(grad_BNTD, cos_BTH, -sin_BTH, to_heads=False)


def vmem_bytes(length: int, head_dim: int, itemsize: int) -> int:
    """What the blocks take of VMEM, two buffers of each: the largest heads in use (256) need 8 MiB in float32."""
    return 2 * _block_tokens(length) * head_dim * (2 * itemsize + 2 * 4)


def _block_tokens(length: int) -> int:
    return min(_MAX_BLOCK_TOKENS, -(-length // _SUBLANES) * _SUBLANES)


def _call(x: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array, *, to_heads: bool) -> jax.Array:
    batch, length, half = cos_BTH.shape
    head_dim = 2 * half
    num_heads = x.size // (batch * length * head_dim)
    tokens = _block_tokens(length)
    columns = pl.BlockSpec((1, tokens, head_dim), lambda b, t, n: (b, t, n))
    heads = pl.BlockSpec((1, None, tokens, head_dim), lambda b, t, n: (b, n, t, 0))
    angles = pl.BlockSpec((1, tokens, head_dim), lambda b, t, n: (b, t, 0))  # fetched once for all heads
    shape = (batch, num_heads, length, head_dim) if to_heads else (batch, length, num_heads * head_dim)
    num_bytes = 2 * x.size * x.dtype.itemsize + 2 * 4 * batch * length * head_dim
    return pl.pallas_call(
        _kernel,
        grid=(batch, -(-length // tokens), num_heads),
        in_specs=[columns if to_heads else heads, angles, angles],
        out_specs=heads if to_heads else columns,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=3 * x.size, transcendentals=0, bytes_accessed=num_bytes),
        name="rotate_heads" if to_heads else "rotate_heads_back",
    )(x, jnp.concatenate([cos_BTH, cos_BTH], axis=-1), jnp.concatenate([-sin_BTH, sin_BTH], axis=-1))


def _kernel(x_ref, cos_ref, sin_ref, out_ref):
    # all of them: (1, tokens, head dim); sin has the sign of the first half turned
    x = x_ref[...].astype(jnp.float32)
    pair = pltpu.roll(x, x.shape[-1] // 2, axis=2)
    out_ref[...] = (x * cos_ref[...] + pair * sin_ref[...]).astype(out_ref.dtype)
