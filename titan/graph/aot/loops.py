"""How often the loops of a compiled program turn, and so how often each of its computations runs."""

import re

from titan.graph.aot.hlo import HloModule, Instruction


def runs(module: HloModule, computation: str) -> int:
    """How often a computation's instructions run in one run of the program, fused or not."""
    if computation == module.entry:
        return 1
    times = 0
    for caller, instruction in module.callers[computation]:
        if not instruction.opcode.endswith(("-done", "-update")):  # these name what their start calls
            turns = trip_count(module, instruction) if instruction.opcode == "while" else 1
            times += turns * runs(module, caller)
    return times


def trip_count(module: HloModule, loop: Instruction) -> int:
    """The turns of a loop that counts from 0 in steps of 1 to the constant in its condition; 1 if there is none."""
    condition = re.search(r"condition=%([\w.\-]+)", loop.attributes)
    inner = list(module.computations.get(condition[1] if condition else "", ()))
    # The comparison may have been made into a fusion.
    inner += [one for instruction in tuple(inner) for name in instruction.called for one in module.computations[name]]
    bounds = [int(one.literal) for one in inner if one.opcode == "constant" and re.fullmatch(r"-?\d+", one.literal)]
    return max(bounds, default=1)
