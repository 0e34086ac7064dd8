"""One kernel at one real shape, as the benchmarks and the tuner see it."""

import dataclasses
from collections.abc import Callable, Mapping
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


@dataclasses.dataclass(frozen=True)
class TuningCase:
    """One Pallas kernel at one shape, to find its best block sizes.

    Attributes:
      kernel: the name of the tile table.
      key: the shape's key in the table.
      pass_name: which of the kernel's passes this is, such as "forward"; passes of one key share its entry.
      args: abstract arguments of the functions.
      candidates: block sizes to try, as the table stores them, each within the VMEM budget.
      build: from block sizes to the JAX function of `args` that runs the pass.
      hlo_name: the kernel's name in the compiled program.
      num_steps: from block sizes to the number of grid steps that compute.
      values: what an argument holds where the pass is timed, by its position; the others hold zeros.
    """

    kernel: str
    key: str
    pass_name: str
    args: tuple[jax.ShapeDtypeStruct, ...]
    candidates: tuple[dict[str, int], ...]
    build: Callable[[dict[str, int]], Callable[..., Any]]
    hlo_name: str
    num_steps: Callable[[dict[str, int]], int]
    values: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
