"""An optimized HLO module, read from its text: instructions in schedule order, shapes, sizes, calls.

Only what the report needs is read. The text is as `jax.stages.Compiled.as_text()` gives it; sizes follow the tiled
layouts of TPUs, in which the last dims are padded to whole tiles.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ARRAY = re.compile(r"(pred|token|[a-z]+\d+\w*)\[([\d,]*)\](?:\{([\d,]*)((?::[^{}]*)?)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)((?:\([\d,]+\))*)")
_SPACE = re.compile(r"S\((\d+)\)")
_BITS = re.compile(r"[a-z]+(\d+)")

HBM, VMEM, HOST = 0, 1, 5
"""Memory spaces of XLA:TPU, as `S(1)` in a layout; absent is HBM."""


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    Attributes:
      dtype: as HLO spells it: "bf16", "s32", "pred".
      dims: its shape.
      minor_to_major: the order of dims in memory, the fastest first.
      tile: of the fastest dims, slowest first, to whole multiples of which they are padded; () is none.
      space: `HBM`, `VMEM`, `HOST` or another number of XLA's.
    """

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    tile: tuple[int, ...]
    space: int

    @property
    def num_bytes(self) -> int:
        """Its elements' bytes, without padding."""
        return -(-math.prod(self.dims) * _bits(self.dtype) // 8)

    @property
    def padded_bytes(self) -> int:
        """What it occupies."""
        if not self.tile or not self.dims:
            return self.num_bytes
        sizes = [self.dims[dim] for dim in self.minor_to_major] or list(self.dims)
        for index, tile in enumerate(reversed(self.tile)):
            if index < len(sizes):
                sizes[index] = -(-sizes[index] // tile) * tile
        return -(-math.prod(sizes) * _bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: unique in the module.
      opcode: "fusion", "all-gather-start", ...
      result: text of the result's shape.
      operands: names of the instructions it takes.
      literal: the value of a constant, as text; "" for other opcodes.
      attributes: the text after the operands.
      is_root: whether its result is that of its computation.
    """

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its result, those of nested tuples in order."""
        return parse_arrays(self.result)

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that it calls."""
        return tuple(name for group in _CALLED.findall(self.attributes) for name in _NAME.findall(group))

    @functools.cached_property
    def op_name(self) -> str:
        """JAX's name of the operation, with the scopes it was traced in; "" if it has none."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A module.

    Attributes:
      computations: name to instructions, in the order in which they are scheduled.
      entry: the name of the computation that the program begins with.
    """

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    def instructions(self) -> Iterator[tuple[str, Instruction]]:
        """All instructions, each with its computation's name."""
        for computation, instructions in self.computations.items():
            for instruction in instructions:
                yield computation, instruction

    @functools.cached_property
    def callers(self) -> dict[str, list[tuple[str, Instruction]]]:
        """Computation to the instructions that call it, each with the computation it is in."""
        callers: dict[str, list[tuple[str, Instruction]]] = {name: [] for name in self.computations}
        for computation, instruction in self.instructions():
            for called in instruction.called:
                callers.setdefault(called, []).append((computation, instruction))
        return callers

    def calls_to(self, computation: str) -> Iterator[Instruction]:
        """The instructions through which `computation` is reached from the entry, the nearest first."""
        pending, seen = [computation], set()
        while pending:
            for caller, instruction in self.callers[pending.pop()]:
                if instruction.name not in seen:
                    seen.add(instruction.name)
                    pending.append(caller)
                    yield instruction


def parse_hlo(text: str) -> HloModule:
    """Reads the text of a module.

    Raises:
      ValueError: there is no entry computation, or a line cannot be read.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif _INSTRUCTION.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += "\n" + line  # metadata of a kernel may hold line breaks
    if not entry:
        raise ValueError("the text of the compiled program has no entry computation")
    return HloModule({name: tuple(map(_instruction, lines)) for name, lines in computations.items()}, entry)


def _instruction(line: str) -> Instruction:
    head = _INSTRUCTION.match(line)
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end)
    if not opcode:
        raise ValueError(f"cannot read an instruction of the compiled program: {line[:200]!r}")
    close = _closing(line, opcode.end() - 1)
    return Instruction(
        name=head[2],
        opcode=opcode[1],
        result=line[start:end],
        operands=tuple(_NAME.findall(line[opcode.end() : close])),
        literal=line[opcode.end() : close] if opcode[1] == "constant" else "",
        attributes=line[close + 1 :],
        is_root=bool(head[1]),
    )


_PARENTHESIS = re.compile(r"[()]")


def _closing(text: str, start: int) -> int:
    """The position of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"cannot read an instruction of the compiled program: {text[:200]!r}")


def parse_arrays(shape: str) -> tuple[Array, ...]:
    """The arrays in the text of a shape, which may be a tuple: "(f32[2,3]{1,0:T(8,128)S(1)}, u32[])"."""
    arrays = []
    for dtype, dims, order, annotations in _ARRAY.findall(shape):
        tile, space = _TILE.search(annotations), _SPACE.search(annotations)
        arrays.append(
            Array(
                dtype,
                _numbers(dims),
                _numbers(order),
                _numbers(tile[1]) if tile else (),
                int(space[1]) if space else HBM,
            )
        )
    return tuple(arrays)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def _bits(dtype: str) -> int:
    if dtype == "token":
        return 0
    if dtype == "pred":
        return 8
    return int(_BITS.match(dtype)[1])
