"""The table of lowerings: ATen overload name -> the function that computes it in JAX.

    @lowering("aten.add.Tensor", "aten.add.Scalar")
    def _add(ctx, self, other, *, alpha=1): ...

A lowering takes the arguments of the ATen schema under their schema names, with tensors as JAX arrays, and returns one
array, or a tuple where the schema returns several. The caller casts each result to the dtype in the FX metadata and
checks its shape.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import torch

from titan.graph.lowering.dtypes import array_dtype, compute_dtype


class LoweringError(Exception):
    """A graph cannot be lowered, or a lowering disagrees with the graph's metadata; the text names op and node."""


@dataclasses.dataclass(frozen=True)
class TensorMeta:
    """Shape and torch dtype of one result, from the FX metadata."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def array_dtype(self) -> np.dtype:
        """The dtype of the JAX array (int64 -> int32, float64 -> float32)."""
        return array_dtype(self.dtype)


@dataclasses.dataclass(frozen=True)
class LoweringContext:
    """What a lowering may know besides its arguments.

    Attributes:
      out: metadata of the results in the order of the schema, lists flattened; None where the op returns no tensor.
      matmul_precision: precision of every dot and convolution (it matters on TPU for float32 operands).
      platform: JAX's name of the platform that the program is for; empty where it is not known.
      is_first_transposed: whether the op's first argument is the transposition of another result.
    """

    out: tuple[TensorMeta | None, ...]
    matmul_precision: jax.lax.Precision = jax.lax.Precision.DEFAULT
    platform: str = ""
    is_first_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.out[0].shape

    @property
    def dtype(self) -> np.dtype:
        """Array dtype of the first result."""
        return self.out[0].array_dtype

    @property
    def compute_dtype(self) -> np.dtype:
        """The dtype in which torch computes the first result: float32 where the result is a narrower float."""
        return compute_dtype(self.out[0].array_dtype)


Lowering = Callable[..., Any]

_TABLE: dict[str, Lowering] = {}

TABLE: Mapping[str, Lowering] = MappingProxyType(_TABLE)
"""Every lowering by overload name, e.g. `aten.add.Tensor`. Filled by importing `titan.graph.lowering.ops`."""


def lowering(*names: str) -> Callable[[Lowering], Lowering]:
    """Enters the decorated function into the table under each of `names` (`namespace.op.overload`).

    Raises:
      ValueError: a name is not of that form or has a lowering already.
    """

    def register(function: Lowering) -> Lowering:
        for name in names:
            if name.count(".") < 2:
                raise ValueError(f"{name!r} is no overload name: write namespace.op.overload, such as aten.add.Tensor")
            if name in _TABLE:
                raise ValueError(f"{name} has two lowerings: {_TABLE[name].__module__} and {function.__module__}")
            _TABLE[name] = function
        return function

    return register


def overload_name(target: Any) -> str:
    """The table's name for an FX call target: `aten.add.Tensor` for `torch.ops.aten.add.Tensor`."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}.{target._overloadname}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}.default"
    return getattr(target, "__name__", str(target))
