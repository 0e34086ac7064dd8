"""Which buffers of a compiled program are live at its memory peak, read from the schedule in its text.

The compiler reports how much memory a program needs, and not what lies in it. The optimized HLO is in schedule order, so
each buffer's life is from the instruction that makes it to the last that reads it, through instructions that only
rename it. Every computation but the entry counts as one instruction, so what a loop's body needs besides its carry is
not seen; the sum at the peak is therefore an account of the larger buffers, and the compiler's number stands beside it.
"""

import collections
import dataclasses
import re

from titan.graph.aot.hlo import HBM, Array, HloModule, Instruction

_INDEX = re.compile(r"index=(\d+)")
_ALIASING = re.compile(r"output_to_operand_aliasing=\{(.*?\}\))\s*\}")
_ALIAS = re.compile(r"\{([\d,]*)\}:\s*\((\d+),\s*\{([\d,]*)\}")
_INPUT_OUTPUT = re.compile(r"\{([\d,]*)\}: \((\d+), \{[\d,]*\}, (?:may|must)-alias\)")
_RENAMES = ("bitcast", "tuple", "optimization-barrier", "while", "add-dependency", "domain")
_TPU_RENAMES = ('custom_call_target="ConcatBitcast"', 'custom_call_target="AssumeGatherIndicesInBound"')


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """A buffer in HBM, besides the program's arguments.

    Attributes:
      array: its shape.
      bytes: with padding.
      opcode: of the instruction that makes it.
      op_name: JAX's name of that operation, or of what it is made from; "" where the compiler made both up.
      last_op_name: the same of the last instruction that reads it.
    """

    array: Array
    bytes: int
    opcode: str
    op_name: str
    last_op_name: str


@dataclasses.dataclass
class _Buffer:
    array: Array
    opcode: str
    op_name: str
    first: int
    last: int
    last_op_name: str
    is_argument: bool


def live_at_peak(module: HloModule, text_header: str = "") -> tuple[LiveBuffer, ...]:
    """The buffers in HBM at the point of the schedule at which they are the most, the largest first.

    Args:
      module: a scheduled module.
      text_header: the line `HloModule ...` of its text, for the outputs that are written over donated arguments.
    """
    schedule = module.computations[module.entry]
    buffers, outputs = _lives(schedule)
    aliased = {int(output.split(",")[0] or 0) for output, _ in _INPUT_OUTPUT.findall(text_header)}
    in_place = {id(buffer) for index, buffer in enumerate(outputs) if index in aliased}
    temporaries = [
        buffer
        for buffer in buffers
        if buffer.array.space == HBM and not buffer.is_argument and id(buffer) not in in_place
    ]
    change: collections.Counter[int] = collections.Counter()
    for buffer in temporaries:
        change[buffer.first] += buffer.array.padded_bytes
        change[buffer.last + 1] -= buffer.array.padded_bytes
    live = peak = peak_at = 0
    for time in sorted(change):
        live += change[time]
        if live > peak:
            peak, peak_at = live, time
    return tuple(
        LiveBuffer(buffer.array, buffer.array.padded_bytes, buffer.opcode, buffer.op_name, buffer.last_op_name)
        for buffer in sorted(temporaries, key=lambda buffer: -buffer.array.padded_bytes)
        if buffer.first <= peak_at <= buffer.last
    )


def _lives(schedule: tuple[Instruction, ...]) -> tuple[list[_Buffer], list[_Buffer]]:
    """All buffers of a computation, and those of its result."""
    buffers: list[_Buffer] = []
    values: dict[str, list[_Buffer]] = {}  # by instruction: one buffer for each array of its result
    result: list[_Buffer] = []
    for time, instruction in enumerate(schedule):
        operands = [buffer for name in instruction.operands for buffer in values.get(name, ())]
        for buffer in operands:
            buffer.last, buffer.last_op_name = time, instruction.op_name or buffer.last_op_name
        value = _renamed(instruction, values)
        if value is None:
            reused = _reused(instruction, values)
            value = []
            for index, array in enumerate(instruction.arrays):
                if index not in reused:
                    # What the compiler made up, above all copies, is named after what it is made from.
                    op_name = instruction.op_name or next((b.op_name for b in operands if b.op_name), "")
                    is_argument = instruction.opcode == "parameter"
                    buffers.append(_Buffer(array, instruction.opcode, op_name, time, time, op_name, is_argument))
                value.append(reused.get(index) or buffers[-1])
        values[instruction.name] = value
        if instruction.is_root:
            result = value
            for buffer in value:
                buffer.last = len(schedule)
    return buffers, result


def _renamed(instruction: Instruction, values: dict[str, list[_Buffer]]) -> list[_Buffer] | None:
    """The buffers of an instruction that makes none; None for one that does."""
    first = values.get(instruction.operands[0], []) if instruction.operands else []
    if instruction.opcode == "get-tuple-element":
        index = int(_INDEX.search(instruction.attributes)[1])
        return first[index : index + 1] or None
    if instruction.opcode == "copy-done":
        return first[:1] or None  # of (destination, source, context)
    if instruction.opcode.endswith("-done"):
        # Of ((operands), results, context).
        shapes = [str(array) for array in instruction.arrays]
        found = [
            buffer for buffer in first if str(buffer.array) in shapes and buffer.array.space == _space(instruction)
        ]
        return found[-len(shapes) :] or None
    if instruction.opcode in _RENAMES or any(name in instruction.attributes for name in _TPU_RENAMES):
        return [buffer for name in instruction.operands for buffer in values.get(name, ())]
    return None


def _space(instruction: Instruction) -> int:
    return instruction.arrays[0].space if instruction.arrays else HBM


def _reused(instruction: Instruction, values: dict[str, list[_Buffer]]) -> dict[int, _Buffer]:
    """Results that are written over an operand, or are one: by position."""
    operands = [values.get(name, []) for name in instruction.operands]
    if instruction.opcode.endswith("-start"):
        if instruction.opcode == "copy-start":
            return {1: operands[0][0]} if operands and operands[0] else {}
        sources = [buffer for operand in operands for buffer in operand]
        return dict(enumerate(sources))
    if instruction.opcode == "dynamic-update-slice":
        return {0: operands[0][0]} if operands[0] else {}
    reused = {}
    aliasing = _ALIASING.search(instruction.attributes)
    for output, operand, index in _ALIAS.findall(aliasing[1]) if aliasing else ():
        buffers = operands[int(operand)]
        position = int(index.split(",")[0]) if index else 0
        if position < len(buffers):
            reused[int(output.split(",")[0]) if output else 0] = buffers[position]
    return reused
