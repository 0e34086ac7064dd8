"""Tensors as JAX arrays and back, without a copy where the memory allows it."""

import jax
import jax.numpy as jnp
import torch

_DTYPES = {
    torch.float32: jnp.float32,
    torch.bfloat16: jnp.bfloat16,
    torch.float16: jnp.float16,
    torch.int64: jnp.int32,
    torch.int32: jnp.int32,
    torch.int16: jnp.int16,
    torch.int8: jnp.int8,
    torch.uint8: jnp.uint8,
    torch.bool: jnp.bool_,
}
_TORCH_DTYPES = {jnp.dtype(value): key for key, value in _DTYPES.items() if key is not torch.int64}


def array_dtype(dtype: torch.dtype) -> jnp.dtype:
    """The JAX dtype in which a kernel takes a tensor: int64 as int32, everything else as it is.

    Raises:
      TypeError: there is none; float64, above all, which JAX would silently round to float32.
    """
    if dtype not in _DTYPES:
        raise TypeError(f"a kernel takes no {dtype} tensor: convert it first, e.g. to torch.float32")
    return jnp.dtype(_DTYPES[dtype])


def torch_dtype(dtype: jnp.dtype) -> torch.dtype:
    """The torch dtype of a kernel's result.

    Raises:
      TypeError: torch has no such dtype.
    """
    if jnp.dtype(dtype) not in _TORCH_DTYPES:
        raise TypeError(f"a kernel returned {dtype}, which has no torch dtype here")
    return _TORCH_DTYPES[jnp.dtype(dtype)]


def abstract_array(tensor: torch.Tensor | None) -> jax.ShapeDtypeStruct | None:
    """Shape and dtype of the array that a tensor becomes."""
    if tensor is None:
        return None
    return jax.ShapeDtypeStruct(tuple(int(size) for size in tensor.shape), array_dtype(tensor.dtype))


def to_array(tensor: torch.Tensor | None) -> jax.Array | None:
    """A CPU tensor as a JAX array. They share memory where it is contiguous and aligned to JAX's liking."""
    if tensor is None:
        return None
    array_dtype(tensor.dtype)
    if tensor.dtype == torch.int64:
        tensor = tensor.to(torch.int32)
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def to_tensor(array: jax.Array) -> torch.Tensor:
    """A JAX array on the CPU as a tensor that shares its memory."""
    torch_dtype(array.dtype)
    return torch.from_dlpack(array)
