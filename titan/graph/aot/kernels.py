"""The Mosaic kernels in a compiled program."""

import collections
import re

from titan.graph.aot.hlo import HloModule

_MOSAIC = 'custom_call_target="tpu_custom_call"'
_NUMBER = re.compile(r"(?:\.(?:\d+|clone|remat))+$")


def count_kernels(module: HloModule) -> dict[str, int]:
    """Kernel name to how many instructions call it, the most first. In a loop's body it counts once."""
    names = (
        _NUMBER.sub("", instruction.name)
        for _, instruction in module.instructions()
        if instruction.opcode == "custom-call" and _MOSAIC in instruction.attributes
    )
    return dict(collections.Counter(names).most_common())
