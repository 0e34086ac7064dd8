import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titan.core.array_digest import array_digest

_MIX = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)


def _reference(words: np.ndarray) -> int:
    """The documented sum, element by element in Python integers."""
    total = 0
    for index, word in enumerate(words.reshape(-1).tolist()):
        mixed = word ^ (index * _MIX[0] % 2**32)
        mixed = (mixed ^ (mixed >> 16)) * _MIX[1] % 2**32
        mixed = (mixed ^ (mixed >> 13)) * _MIX[2] % 2**32
        total += mixed ^ (mixed >> 16)
    return total % 2**32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "uint8", "bool"])
def test_equals_the_definition(dtype):
    array = jax.random.normal(jax.random.key(0), (3, 4, 5)).astype(dtype)
    words = np.asarray(array).view(f"uint{8 * array.dtype.itemsize}")
    digest = array_digest(array)
    assert digest.dtype == jnp.uint32
    assert int(digest) == _reference(words)


def test_scalars_and_empty_arrays():
    assert int(array_digest(jnp.uint32(7))) == _reference(np.array([7]))
    assert int(array_digest(jnp.zeros((0, 3)))) == 0


def test_every_single_bit_and_any_swap_changes_it():
    array = jax.random.normal(jax.random.key(1), (6, 7))
    bits = np.asarray(array).view(np.uint32).reshape(-1)
    variants = [bits]
    for index in range(bits.size):
        for bit in range(32):
            variants.append(bits.copy())
            variants[-1][index] ^= np.uint32(1 << bit)
    for index in range(bits.size - 1):
        variants.append(bits.copy())
        variants[-1][[index, index + 1]] = bits[[index + 1, index]]
    digests = {int(array_digest(jnp.asarray(variant))) for variant in variants}
    assert len(digests) == len(variants)
