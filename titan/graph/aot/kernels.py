"""The Mosaic kernels in a compiled program."""

import collections
import re

from titan.graph.aot.hlo import HloModule, Instruction

_MOSAIC = 'custom_call_target="tpu_custom_call"'
_NUMBER = re.compile(r"(?:\.(?:\d+|clone|remat))+$")


def is_kernel(instruction: Instruction) -> bool:
    """Whether the instruction calls a Mosaic kernel, one of ours or one that the compiler brings."""
    return instruction.opcode == "custom-call" and _MOSAIC in instruction.attributes


def kernel_name(instruction: Instruction) -> str:
    """The name of the kernel that an instruction calls."""
    return _NUMBER.sub("", instruction.name)


def count_kernels(module: HloModule) -> dict[str, int]:
    """Kernel name to how many instructions call it, the most first. In a loop's body it counts once."""
    names = (kernel_name(instruction) for _, instruction in module.instructions() if is_kernel(instruction))
    return dict(collections.Counter(names).most_common())
