"""Which JAX dtype stands for a torch dtype, and torch's type promotion for JAX arrays.

JAX runs with x64 off: 64-bit integers are int32 arrays in the program and float64 is float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

_ARRAY_DTYPES = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint32),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int32),
    torch.float8_e4m3fn: jnp.dtype(jnp.float8_e4m3fn),
    torch.float8_e5m2: jnp.dtype(jnp.float8_e5m2),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: jnp.dtype(jnp.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float32),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex64),
}

# Reading an array's dtype back: the first torch dtype that maps to it, except that int32 and float32 stand for
# themselves.
_TORCH_DTYPES = {array: torch_dtype for torch_dtype, array in reversed(_ARRAY_DTYPES.items())} | {
    np.dtype(np.uint32): torch.uint32,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}

Scalar = bool | int | float


def array_dtype(dtype: torch.dtype) -> np.dtype:
    """The dtype of the JAX array that stands for a tensor of `dtype` (int64 -> int32, float64 -> float32).

    Raises:
      TypeError: JAX has no such dtype (quantised and sub-byte types).
    """
    try:
        return _ARRAY_DTYPES[dtype]
    except KeyError:
        raise TypeError(
            f"{dtype} has no JAX counterpart; convert it in the model before the graph is captured"
        ) from None


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which torch computes maths on `dtype`: float32 for the narrower floats, else the dtype itself."""
    return np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def kind(dtype: np.dtype) -> str:
    """`bool`, `int`, `float` or `complex`."""
    if dtype == np.bool_:
        return "bool"
    if jnp.issubdtype(dtype, jnp.integer):
        return "int"
    return "float" if jnp.issubdtype(dtype, jnp.floating) else "complex"


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """The values of a concrete tensor as a numpy array of the dtype that the program uses.

    Raises:
      OverflowError: a 64-bit integer does not fit into 32 bits.
    """
    tensor = tensor.detach().cpu()
    dtype = array_dtype(tensor.dtype)
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(dtype)
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return tensor.contiguous().view(torch.uint8).numpy().view(dtype)
    values = tensor.resolve_conj().resolve_neg().numpy()
    if kind(dtype) == "int" and values.size and values.dtype.itemsize == 8:
        limits = np.iinfo(dtype)
        if values.min() < limits.min or values.max() > limits.max:
            raise OverflowError(f"a {tensor.dtype} tensor holds values beyond {dtype}, which JAX uses in its place")
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, as in torch
        return values.astype(dtype)


def cast(value: jax.Array | Scalar, dtype: np.dtype) -> jax.Array | np.generic:
    """`value` in `dtype`: an array is converted (unless it has that dtype), a Python number becomes a typed scalar."""
    if isinstance(value, (bool, int, float)):
        return dtype.type(value)
    return value if value.dtype == dtype else jax.lax.convert_element_type(value, dtype)


def is_exact(value: Scalar, dtype: np.dtype) -> bool:
    """Whether a Python number survives the conversion to `dtype` unchanged."""
    return value != value or float(dtype.type(value)) == value


def promote(left: jax.Array | Scalar, right: jax.Array | Scalar) -> tuple[jax.Array | np.generic, ...]:
    """Both operands in the dtype that torch promotes them to: dims outrank 0-dim tensors, which outrank numbers."""
    dtype = result_dtype(left, right)
    return cast(left, dtype), cast(right, dtype)


def result_dtype(left: jax.Array | Scalar, right: jax.Array | Scalar) -> np.dtype:
    """The array dtype of `torch.result_type(left, right)`."""
    return _result_dtype(_operand_kind(left), _operand_kind(right))


def _operand_kind(operand: jax.Array | Scalar) -> Any:
    return type(operand) if isinstance(operand, (bool, int, float)) else (operand.dtype, operand.ndim > 0)


@functools.cache
def _result_dtype(left: Any, right: Any) -> np.dtype:
    return array_dtype(torch.result_type(_example(left), _example(right)))


def _example(operand_kind: Any) -> torch.Tensor | Scalar:
    if isinstance(operand_kind, type):
        return operand_kind(1)
    dtype, has_dims = operand_kind
    return torch.empty((1,) if has_dims else (), dtype=_TORCH_DTYPES[dtype], device="meta")
