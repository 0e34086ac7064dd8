"""The Mosaic kernels in a compiled program, and what they cost."""

import collections
import re
from collections.abc import Mapping
from typing import NamedTuple

from titan.graph.aot.hlo import HloModule, Instruction

_MOSAIC = 'custom_call_target="tpu_custom_call"'
_DECLARED = re.compile(r'"cost_estimate":\{"flops":"(\d+)","transcendentals":"\d+","bytes_accessed":"(\d+)"')
_NUMBER = re.compile(r"(?:\.(?:\d+|clone|remat))+$")


class KernelCost(NamedTuple):
    """What a kernel declares that one call of it costs: FLOPs, and bytes between it and the device's memory."""

    flops: int
    hbm_bytes: int


def is_kernel(instruction: Instruction) -> bool:
    """Whether the instruction calls a Mosaic kernel, one of ours or one that the compiler brings."""
    return instruction.opcode == "custom-call" and _MOSAIC in instruction.attributes


def kernel_name(instruction: Instruction) -> str:
    """The name of the kernel that an instruction calls."""
    return _NUMBER.sub("", instruction.name)


def declared_cost(instruction: Instruction) -> KernelCost | None:
    """What the kernel that an instruction calls declares; None if it declares nothing."""
    declared = _DECLARED.search(instruction.attributes)
    return KernelCost(int(declared[1]), int(declared[2])) if declared else None


def flops_of_call(instruction: Instruction, kernel_flops: Mapping[str, float]) -> float:
    """FLOPs of a call of a kernel that declares none.

    Args:
      instruction: the call.
      kernel_flops: FLOPs of one call on one device, by how the kernel's name begins; others have none.
    """
    name = kernel_name(instruction)
    return next((flops for prefix, flops in kernel_flops.items() if name.startswith(prefix)), 0.0)


def count_kernels(module: HloModule) -> dict[str, int]:
    """Kernel name to how many instructions call it, the most first. In a loop's body it counts once."""
    names = (kernel_name(instruction) for _, instruction in module.instructions() if is_kernel(instruction))
    return dict(collections.Counter(names).most_common())
