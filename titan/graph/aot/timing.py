"""A model of a step's time, from the compiler's own estimates. It is a model: nothing here ran on a TPU.

Instructions take the cycles that XLA:TPU estimates for them, at the clock that the matrix units need for the stated
peak. Kernels take what they declare: the longer of their FLOPs at the peak and their bytes at the memory's bandwidth.
An exposed collective takes its bytes at the bandwidth of the links (see `CollectiveTime`); one that is asynchronous,
and every asynchronous copy, is taken to be hidden. A loop takes its body's time as often as its condition says.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping

from titan.core.hardware import Hardware
from titan.graph.aot.collectives import Collective
from titan.graph.aot.hlo import HBM, HloModule, Instruction
from titan.graph.aot.kernels import declared_cost, flops_of_call, is_kernel, kernel_name
from titan.graph.aot.loops import runs, trip_count

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_MOVING = ("copy", "concatenate", "slice", "dynamic-slice", "transpose", "broadcast", "convert")
_MATMULS = ("convolution", "dot")

DCN_BYTES_PER_SECOND_PER_CHIP = 6.25e9
"""Bandwidth between slices: 200 Gbit/s for a host of four chips."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Modelled seconds of one step, by what they are spent on.

    Attributes:
      matmuls: fusions with a matrix product in them.
      other: all other instructions.
      kernels: Mosaic kernels.
      exposed_collectives: those during which nothing else runs.
      undeclared: kernels that declare no cost, for which `kernel_flops` stood in, or nothing.
    """

    matmuls: float
    other: float
    kernels: float
    exposed_collectives: float
    undeclared: tuple[str, ...]

    @property
    def total(self) -> float:
        """All of it."""
        return self.matmuls + self.other + self.kernels + self.exposed_collectives


@dataclasses.dataclass(frozen=True)
class Links:
    """The interconnect of a slice as a collective sees it.

    A chip receives over all its links at once, one for each neighbour: two in a dim whose ends are joined, else one.
    The devices of a chip share them. An all-gather or reduce-scatter over N devices moves (N-1)/N of its bytes, an
    all-reduce twice that. Latency is left out.

    Attributes:
      hardware: the generation.
      shape: chips along each dim of the slice.
    """

    hardware: Hardware
    shape: tuple[int, ...]

    @property
    def bytes_per_second(self) -> float:
        """That one device receives at most."""
        wraps = self.hardware.wraps(self.shape)
        links = sum(2 if wrap else 1 for size, wrap in zip(self.shape, wraps, strict=True) if size > 1)
        return max(links, 1) * self.hardware.ici_link_bytes_per_second / self.hardware.devices_per_chip

    def seconds(self, collective: Collective, axis_sizes: Mapping[str, int]) -> float:
        """The time of one collective."""
        passes = 2 if collective.kind == "all-reduce" else 1
        if collective.axes == "between slices":
            return passes * collective.bytes * self.hardware.devices_per_chip / DCN_BYTES_PER_SECOND_PER_CHIP
        num_devices = 1
        for axis in collective.axes.split(" x "):
            num_devices *= axis_sizes.get(axis, 1)
        return passes * collective.bytes * (num_devices - 1) / num_devices / self.bytes_per_second


def step_time(
    module: HloModule,
    collectives: list[Collective],
    links: Links,
    axis_sizes: Mapping[str, int],
    kernel_flops: Mapping[str, float],
) -> StepTime:
    """The modelled time of a program.

    Args:
      module: after code generation, when cycles have been estimated.
      collectives: of this module.
      links: the slice's interconnect.
      axis_sizes: devices along each mesh axis.
      kernel_flops: of one call of each kernel that declares no cost, see `kernels.flops_of_call`.
    """
    hardware = links.hardware
    turns = functools.cache(functools.partial(_turns, module))
    spent = {"matmuls": 0.0, "other": 0.0, "kernels": 0.0}
    undeclared: dict[str, None] = {}
    for computation, instruction in module.instructions():
        if not (times := turns(computation)):
            continue
        if is_kernel(instruction):
            declared = declared_cost(instruction)
            flops, hbm_bytes = declared or (flops_of_call(instruction, kernel_flops), 0)
            spent["kernels"] += times * max(
                flops / hardware.peak_bf16_flops * hardware.devices_per_chip,
                hbm_bytes / hardware.hbm_bytes_per_second * hardware.devices_per_chip,
            )
            if not declared:
                undeclared[kernel_name(instruction)] = None
            continue
        cycles = _CYCLES.search(instruction.attributes)
        seconds = 0.0
        if cycles:
            seconds = int(cycles[1]) / hardware.clock_hz
        elif instruction.opcode in _MOVING:
            moved = 2 * sum(array.padded_bytes for array in instruction.arrays if array.space == HBM)
            seconds = moved * hardware.devices_per_chip / hardware.hbm_bytes_per_second
        spent["matmuls" if _has_matmul(module, instruction) else "other"] += times * seconds
    exposed = sum(
        links.seconds(one, axis_sizes) * runs(module, one.computation) for one in collectives if not one.asynchronous
    )
    return StepTime(**spent, exposed_collectives=exposed, undeclared=tuple(undeclared))


def _turns(module: HloModule, computation: str) -> int:
    """How often a computation's instructions run as instructions of their own; 0 for one that is part of a fusion."""
    if computation == module.entry:
        return 1
    times = 0
    for caller, instruction in module.callers[computation]:
        if instruction.opcode == "while":
            times += _turns(module, caller) * trip_count(module, instruction)
        elif instruction.opcode in ("call", "conditional"):
            times += _turns(module, caller)
    return times


def _has_matmul(module: HloModule, instruction: Instruction) -> bool:
    if instruction.opcode in _MATMULS:
        return True
    if instruction.opcode != "fusion":
        return False
    return any(_has_matmul(module, inner) for name in instruction.called for inner in module.computations.get(name, ()))
