"""One kernel at one real shape, as the benchmarks and the tuner see it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """A kernel's forward and backward at a shape.

    Attributes:
      kernel: the kernel's folder.
      name: the shape in words.
      args: abstract arguments of the functions.
      fused: JAX function of `args`, forward and backward, by the kernel.
      unfused: the same results as XLA computes them without the kernel; None where nothing comparable exists.
      flops: matrix-multiply FLOPs of forward and backward that the maths needs, no recompute.
      hbm_bytes: bytes that a perfect kernel would move to and from HBM.
      vmem_bytes: what the kernel's blocks take of VMEM, by arithmetic.
    """

    kernel: str
    name: str
    args: tuple[jax.ShapeDtypeStruct, ...]
    fused: Callable[..., Any]
    unfused: Callable[..., Any] | None
    flops: float
    hbm_bytes: float
    vmem_bytes: int
