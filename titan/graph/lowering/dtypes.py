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

# Reading an array's dtype back: the first torch dtype that maps to it, except that int32 and float32 stand for themselves.
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
        raise TypeError(f"{dtype} has no JAX counterpart; convert it in the model before the graph is captured") from None


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
    if isinstance(value, (bool, int, float, complex)):
        return dtype.type(value)
    return value if value.dtype == dtype else jax.lax.convert_element_type(value, dtype)


def is_exact(value: Scalar, dtype: np.dtype) -> bool:
    """Whether a Python number survives the conversion to `dtype` unchanged."""
    return value != value or float(dtype.type(value)) == value


@functools.cache
def _meta_operand(dtype: np.dtype, has_dims: bool) -> torch.Tensor:
    return torch.empty((1,) if has_dims else (), dtype=_TORCH_DTYPES[dtype], device="meta")


@functools.cache
def _promoted(signature: tuple[Any, ...]) -> np.dtype:
    examples = {bool: True, int: 1, float: 1.0, complex: 1j}
    operands = [examples[entry] if isinstance(entry, type) else _meta_operand(*entry) for entry in signature]
    # torch.result_type takes two operands. Folding it over more would lose which of them are 0-dim tensors or numbers,
    # so the operands of the highest priority (dims, then 0-dim, then numbers) are folded among themselves first.
    tensors = [o for o in operands if isinstance(o, torch.Tensor)]
    numbers = [o for o in operands if not isinstance(o, torch.Tensor)]
    groups = ([t for t in tensors if t.dim()], [t for t in tensors if not t.dim()])
    folded = []
    for group in groups:
        if group:
            dtype = functools.reduce(torch.promote_types, (t.dtype for t in group))
            folded.append(torch.empty((1,) * min(group[0].dim(), 1), dtype=dtype, device="meta"))
    result = folded[0] if folded else torch.tensor(numbers.pop(0), device="meta")
    for operand in folded[1:] + numbers:
        dtype = torch.result_type(result, operand)
        result = torch.empty(tuple(result.shape), dtype=dtype, device="meta")
    return array_dtype(result.dtype)


def result_dtype(*operands: jax.Array | Scalar) -> np.dtype:
    """torch's promoted dtype of tensors and Python numbers (tensors with dims outrank 0-dim tensors outrank numbers)."""
    return _promoted(tuple(type(o) if isinstance(o, (bool, int, float, complex)) else (o.dtype, o.ndim > 0) for o in operands))


def promote(*operands: jax.Array | Scalar) -> list[jax.Array | np.generic]:
    """The operands, each in torch's promoted dtype of all of them."""
    dtype = result_dtype(*operands)
    return [cast(operand, dtype) for operand in operands]
