"""A digest of a jax.Array's bits that does not depend on how the array is sharded."""

import functools
from typing import Any


def array_digest(array: Any) -> Any:
    """32-bit digest of an array: a uint32 scalar on the array's devices, computed in one pass over its memory.

    The sum, modulo 2**32, of one hash per element (of at most 32 bits; larger ones count as two) and its index. Being a
    sum, it is the same however the array is spread over devices and processes. The hash is the finaliser of MurmurHash3
    (Austin Appleby, public domain), a bijection: a change confined to one element always changes the digest, any other
    change with probability 1 - 2**-32. It guards against accidents, not against forgers.

    Args:
      array: jax.Array of any shape and sharding; bool, or a dtype of 1, 2, 4 or 8 bytes that is not complex.
    """
    return _jitted()(array)


@functools.cache
def _jitted() -> Any:
    import jax

    return jax.jit(_digest)


def _digest(array: Any) -> Any:
    import jax
    import jax.numpy as jnp

    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    # Elements of 8 bytes gain a last dim of two halves.
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * min(array.dtype.itemsize, 4)}"))
    # The index is summed per dim, since a reshape to one dim would make XLA gather a sharded array.
    index = jnp.zeros(bits.shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(bits.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[dim]
    mixed = bits.astype(jnp.uint32) ^ (index * jnp.uint32(0x9E3779B1))
    mixed = (mixed ^ (mixed >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> jnp.uint32(16)), dtype=jnp.uint32)
