"""The buffers of a compiled program, as the compiler assigned them, and those that are live at its memory peak."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable

from titan.graph.aot.compiler_dump import CompilerDump
from titan.graph.aot.hlo import HBM, HloModule, Instruction, parse_arrays
from titan.graph.aot.origin import origin

_ALLOCATION = re.compile(r"^allocation \d+: size \d+(?:, color (?P<space>\d+))?(?P<kind>.*):$")
_VALUE = re.compile(r"^ value: <\d+ (?P<name>\S+) @\d+> \(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)$")
_STEP = re.compile(r"^ {4}(\d+):(\S+)$")
_RANGE = re.compile(r"^ {4}(\S+):(\d+)-(\d+)$")


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """One value in memory.

    Attributes:
      bytes: with padding.
      shape: such as "f32[8,512]".
      opcode: of the instruction that makes it.
      op_name: JAX's name of that operation, or of the first that it is made from; "" where there is none.
      last_op_name: the same of the last operation that reads it, or that reads what is copied from it.
      first, last: steps of the schedule.
    """

    bytes: int
    shape: str
    opcode: str
    op_name: str
    last_op_name: str
    first: int
    last: int


def temporaries(dump: CompilerDump, module: HloModule, space: int = HBM) -> list[LiveBuffer]:
    """The values in a memory space that are neither arguments nor in an argument's place, nor constants.

    Args:
      dump: of the compilation.
      module: `dump.hlo`, parsed.
      space: `hlo.HBM` or `hlo.HOST`.
    """
    instructions = {instruction.name: instruction for _, instruction in module.instructions()}
    users = _users(module)
    steps, ranges = _live_ranges(dump.live_ranges)
    buffers = []
    for name, num_bytes, shape in _values(dump.assignment, space):
        if name not in ranges:
            continue
        first, last = ranges[name]
        maker = instructions.get(name.partition("{")[0])
        reader = instructions.get(steps.get(last, ""))
        arrays = parse_arrays(shape)
        buffers.append(
            LiveBuffer(
                num_bytes,
                str(arrays[0]) if len(arrays) == 1 else shape,
                maker.opcode if maker else "",
                _op_name(maker, lambda one: [instructions[o] for o in one.operands if o in instructions]),
                _op_name(reader, lambda one: users[one.name]),
                first,
                last,
            )
        )
    return buffers


def live_at_peak(buffers: list[LiveBuffer]) -> list[LiveBuffer]:
    """Those that are live when the most bytes are, the largest first."""
    change: collections.Counter[int] = collections.Counter()
    for buffer in buffers:
        change[buffer.first] += buffer.bytes
        change[buffer.last + 1] -= buffer.bytes
    live = peak = peak_at = 0
    for step in sorted(change):
        live += change[step]
        if live > peak:
            peak, peak_at = live, step
    return sorted((one for one in buffers if one.first <= peak_at <= one.last), key=lambda one: -one.bytes)


def usage(buffers: Iterable[tuple[str, LiveBuffer]], num_points: int) -> dict[str, tuple[int, ...]]:
    """Bytes in use over the schedule, by kind: of each of at most `num_points` stretches, where the most are in use.

    Args:
      buffers: each with its kind.
      num_points: stretches of equal length that the schedule is cut into.
    """
    buffers = list(buffers)
    num_steps = max((one.last + 1 for _, one in buffers), default=0)
    kinds = list(dict.fromkeys(kind for kind, _ in buffers))
    change = {kind: [0] * (num_steps + 1) for kind in kinds}
    for kind, one in buffers:
        change[kind][one.first] += one.bytes
        change[kind][one.last + 1] -= one.bytes
    live = [list(itertools.accumulate(change[kind][:num_steps])) for kind in kinds]
    totals = [sum(column) for column in zip(*live, strict=True)]
    length = -(-num_steps // num_points) or 1
    highest = [
        max(range(start, min(start + length, num_steps)), key=totals.__getitem__)
        for start in range(0, num_steps, length)
    ]
    return {kind: tuple(series[step] for step in highest) for kind, series in zip(kinds, live, strict=True)}


def _values(assignment: str, space: int) -> list[tuple[str, int, str]]:
    """Name, bytes and shape of each value in the temporary and output allocations of a memory space."""
    values = []
    wanted = False
    for line in assignment.splitlines():
        allocation = _ALLOCATION.match(line)
        if allocation:
            kind = allocation["kind"]
            is_own = not any(word in kind for word in ("parameter ", "constant", "thread-local"))
            wanted = int(allocation["space"] or HBM) == space and is_own
            continue
        value = _VALUE.match(line) if wanted else None
        if value:
            name = value["name"] if "{" in value["name"] else value["name"] + "{}"
            values.append((name, int(value["size"]), value["shape"]))
    return values


def _live_ranges(text: str) -> tuple[dict[int, str], dict[str, tuple[int, int]]]:
    """Step to instruction, and value to first and last step."""
    steps, ranges = {}, {}
    for line in text.splitlines():
        if step := _STEP.match(line):
            steps[int(step[1])] = step[2]
        elif found := _RANGE.match(line):
            ranges[found[1]] = int(found[2]), int(found[3])
    return steps, ranges


def _users(module: HloModule) -> dict[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for _, instruction in module.instructions():
        for operand in instruction.operands:
            users[operand].append(instruction)
    return users


def _op_name(instruction: Instruction | None, neighbours: Callable[[Instruction], Iterable[Instruction]]) -> str:
    """The instruction's name by JAX, or that of the nearest instruction reached by `neighbours`, which has one.

    A name that says which part of the step it belongs to is taken before a nearer one that does not.
    """
    pending = collections.deque([instruction] if instruction else [])
    vague = ""
    for _ in range(64):  # what the compiler makes up is near to what it is made for
        if not pending:
            break
        one = pending.popleft()
        if origin(one.op_name).region:
            return one.op_name
        if "/" in one.op_name:
            vague = vague or one.op_name
        pending.extend(neighbours(one))
    return vague
