"""Compiles every kernel at real shapes with the real TPU compilers, with no TPU, and says what each program needs.

    ./bazelw run //tools/bench:kernels_aot -- [--generations=v6e,tpu7x] [--kernels=splash_attention,...]

A row for each kernel, shape and TPU, forward and backward together: seconds to compile; VMEM in use; HBM temporaries of
the kernel's program and of the program that XLA makes without the kernel ("-": it does not compile, for lack of
memory); matmul FLOPs that the maths needs, bytes that a perfect kernel would move, and the time that these two take at
the chip's peak rates (roofline). No time is measured: there is no TPU.
"""

import argparse
import dataclasses
import gc
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence

from titan.core.hardware import HARDWARE

KERNELS = ("splash_attention", "fused_linear_cross_entropy", "grouped_matmul", "route_scores", "rope")
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel at one shape on one TPU.

    Attributes:
      kernel, case, generation: what was compiled, and for what.
      seconds: to trace, lower and compile.
      vmem_bytes: in use by the largest Mosaic kernel.
      temp_bytes: HBM temporaries.
      unfused_temp_bytes: those of the program without the kernel; None where it does not compile or none exists.
      flops, hbm_bytes: declared by the case.
      roofline_seconds: the larger of what the two take at peak rates.
    """

    kernel: str
    case: str
    generation: str
    seconds: float
    vmem_bytes: int
    temp_bytes: int
    unfused_temp_bytes: int | None
    flops: float
    hbm_bytes: float
    roofline_seconds: float


def roofline_seconds(flops: float, hbm_bytes: float, generation: str) -> float:
    """The least time that one JAX device of a TPU generation needs for so many bfloat16 FLOPs and HBM bytes."""
    hardware = HARDWARE[generation]
    devices = hardware.devices_per_chip
    return max(flops / (hardware.peak_bf16_flops / devices), hbm_bytes / (hardware.hbm_bytes_per_second / devices))


def rows(kernels: Sequence[str], generations: Sequence[str]) -> Iterator[Row]:
    """Compiles case after case."""
    import jax

    from titan.kernels.tpu_compile import compile_for_tpu

    for kernel in kernels:
        specs = importlib.import_module(f"titan.kernels.{kernel}.arg_specs")
        for generation in generations:
            for case in specs.aot_cases(generation):
                program = compile_for_tpu(case.fused, *case.args, generation=generation)
                unfused_temp_bytes = None
                if case.unfused is not None:
                    try:
                        unfused_temp_bytes = compile_for_tpu(case.unfused, *case.args, generation=generation).temp_bytes
                    except jax.errors.JaxRuntimeError as error:
                        if "RESOURCE_EXHAUSTED" not in str(error):
                            raise
                yield Row(
                    kernel=kernel,
                    case=case.name,
                    generation=generation,
                    seconds=program.seconds,
                    vmem_bytes=program.vmem_bytes,
                    temp_bytes=program.temp_bytes,
                    unfused_temp_bytes=unfused_temp_bytes,
                    flops=case.flops,
                    hbm_bytes=case.hbm_bytes,
                    roofline_seconds=roofline_seconds(case.flops, case.hbm_bytes, generation),
                )
                gc.collect()  # a compiled program holds hundreds of MB until it is collected


def text(row: Row) -> str:
    """The row as a line of the table."""
    unfused = "-" if row.unfused_temp_bytes is None else f"{row.unfused_temp_bytes / _MIB:,.0f}"
    return (
        f"{row.kernel:28}{row.case:64}{row.generation:7}{row.seconds:7.1f}{row.vmem_bytes / _MIB:7.1f}"
        f"{row.temp_bytes / _MIB:10,.0f}{unfused:>10}{row.flops / 1e12:9.2f}{row.hbm_bytes / 1e9:8.2f}"
        f"{row.roofline_seconds * 1e3:9.2f}"
    )


_HEADER = (
    f"{'kernel':28}{'shape':64}{'TPU':7}{'s':>7}{'VMEM':>7}{'temp':>10}{'unfused':>10}{'TFLOP':>9}{'GB':>8}{'roofline':>9}"
    f"\n{'':106}{'MiB':>7}{'MiB':>10}{'MiB':>10}{'':>17}{'ms':>9}"
)


def main() -> int:
    """Runs the program on the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", default="v6e,tpu7x", help="TPU generations, separated by commas.")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="Kernels, separated by commas.")
    arguments = parser.parse_args()
    generations, kernels = arguments.generations.split(","), arguments.kernels.split(",")
    for flag, given, known in (("--generations", generations, HARDWARE), ("--kernels", kernels, KERNELS)):
        for name in given:
            if name not in known:
                parser.error(f"{flag}: {name!r} is unknown; give some of {', '.join(known)}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    print(_HEADER, flush=True)
    table = []
    for row in rows(kernels, generations):
        table.append(row)
        print(text(row), flush=True)
    compared = [row for row in table if row.unfused_temp_bytes]
    numbers = {
        "programs": len(table),
        "compile_seconds": round(sum(row.seconds for row in table), 1),
        "max_compile_seconds": round(max(row.seconds for row in table), 1),
        "max_vmem_mib": round(max(row.vmem_bytes for row in table) / _MIB, 1),
    }
    for kernel in kernels:
        ratios = [row.temp_bytes / row.unfused_temp_bytes for row in compared if row.kernel == kernel]
        if ratios:
            numbers[f"{kernel}_max_temp_ratio"] = round(max(ratios), 4)
    print("RESULT " + json.dumps(numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
