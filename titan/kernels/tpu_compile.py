"""Compiles a JAX function for one TPU device with the real XLA:TPU and Mosaic compilers, with no TPU present."""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from titan.kernels.generations import find_generation
from titan.kernels.target import Target, lowering_for
from titan.kernels.tpu_topology import topology_devices

# Memory space 1 is VMEM.
_USED_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class TpuProgram:
    """A program for one device, and what the compiler says of it.

    Attributes:
      seconds: wall time of tracing, lowering and compiling.
      temp_bytes: HBM that the program needs besides arguments and results.
      peak_bytes: the most HBM in use at a time, arguments and results included.
      argument_bytes, output_bytes: HBM of arguments and results.
      flops: by XLA's cost analysis, which sees of kernels only what they declare and counts a loop's body once.
      hbm_bytes: bytes accessed by the same analysis.
      vmem_bytes: VMEM in use by the Mosaic kernel that takes the most of it; 0 without a kernel.
      compiled: JAX's object.
    """

    seconds: float
    temp_bytes: int
    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    flops: float
    hbm_bytes: float
    vmem_bytes: int
    compiled: Any


def tpu_device(generation: str) -> jax.Device:
    """A device of a TPU generation ("v5e", "v5p", "v6e", "tpu7x") that programs can be compiled for and not run on.

    Raises:
      titan.kernels.generations.UnknownTpuError: the generation is unknown.
      RuntimeError: the libtpu package is not installed.
    """
    return topology_devices(find_generation(generation).smallest_slice)[0]


def compile_for_tpu(
    function: Callable[..., Any],
    *args: jax.ShapeDtypeStruct,
    generation: str,
    compiler_options: Mapping[str, str] | None = None,
) -> TpuProgram:
    """Compiles `function` for one device of a TPU generation.

    Args:
      function: of arrays; kernels in it are chosen for the TPU.
      args: shapes and dtypes.
      generation: "v5e", "v5p", "v6e" or "tpu7x".
      compiler_options: XLA options of this compile.

    Raises:
      ValueError, RuntimeError: see `tpu_device`; the compiler's own errors pass through.
    """
    device = tpu_device(generation)
    sharding = jax.sharding.SingleDeviceSharding(device)
    placed = [jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=sharding) for arg in args]
    start = time.perf_counter()
    with jax.default_device(device), lowering_for(Target("tpu", device.device_kind)):
        lowered = jax.jit(function).lower(*placed)
    compiled = lowered.compile(compiler_options=dict(compiler_options or {}))
    seconds = time.perf_counter() - start
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return TpuProgram(
        seconds=seconds,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        flops=cost.get("flops", 0.0),
        hbm_bytes=cost.get("bytes accessed", 0.0),
        vmem_bytes=max(kernel_vmem_bytes(compiled.as_text()), default=0),
        compiled=compiled,
    )


def kernel_vmem_bytes(hlo_text: str) -> list[int]:
    """The VMEM in bytes that each Mosaic kernel of a compiled program uses, in the order of the text."""
    # An instruction is not always one line: a kernel's metadata may hold line breaks.
    instructions = re.split(r"\n\s+(?:ROOT )?%", hlo_text)
    kernels = [text for text in instructions if 'custom_call_target="tpu_custom_call"' in text]
    sizes = [_USED_VMEM.search(line) for line in kernels]
    return [int(size.group(1)) for size in sizes if size]
