"""Memory between the programs of a split step: what lies on a device and in the host while each program runs."""

import collections
import dataclasses
import math
from collections.abc import Collection

from titan.graph.aot.program import CompiledProgram
from titan.graph.split.executable import SplitExecutable, last_reads
from titan.graph.split.pieces import Loop
from titan.graph.split.programs import Form, Programs, Signature


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes while one piece runs, its own temporaries left out; of a loop, in the turn in which they are most.

    Attributes:
      beside: on the device and no argument of the piece's program: other parts of the state, what later pieces read,
        and what is fetched for the next turn.
      between: on the device and neither state nor batch, whether an argument or not.
      on_host: what forward loops have kept for backward loops.
    """

    beside: int
    between: int
    on_host: int


@dataclasses.dataclass(frozen=True)
class Calls:
    """A program of a step, and how it is called.

    Attributes:
      name: what it does.
      program: what the compiler says of it.
      number: calls in one step.
      held: during the call in which it is most on the device.
    """

    name: str
    program: CompiledProgram
    number: int
    held: Held

    @property
    def peak_bytes(self) -> int:
        """In use on a device during that call."""
        return self.program.needed_bytes + self.held.beside


def calls_of(executable: SplitExecutable) -> list[Calls]:
    """The programs of a split step, in the order of their first calls.

    Args:
      executable: its programs are `CompiledProgram`s.
    """
    numbers: collections.Counter[Signature] = collections.Counter()
    most: dict[Signature, Held] = {}
    for piece, signature, beside in zip(executable.split.pieces, executable.signatures, held(executable), strict=True):
        numbers[signature] += piece.num_turns if isinstance(piece, Loop) else 1
        most[signature] = max(most.get(signature, beside), beside, key=lambda one: one.beside)
    programs = executable.programs
    return [
        Calls(programs[signature].name, programs[signature].compiled, number, most[signature])
        for signature, number in numbers.items()
    ]


def held(executable: SplitExecutable) -> list[Held]:
    """What is held while each piece runs. State and batch are there from the first to the last."""
    split = executable.split
    programs = Programs(split, executable.mesh)
    inputs = {name: device_bytes(programs.form(name), executable) for name in split.inputs}
    between: dict[str, int] = {}
    on_host: dict[str, int] = {}
    found = []
    for piece, unread in zip(split.pieces, last_reads(split), strict=True):
        fetched = 0
        if isinstance(piece, Loop):
            sizes = {name: device_bytes(programs.form(name), executable) for name in (*piece.stacks, *piece.stacked)}
            fetched = sum(sizes[name] for name in piece.stacks if name in split.by_turn)
            on_host |= {
                name: sizes[name] * piece.num_turns
                for name, zeros in zip(piece.stacked, piece.zeros, strict=True)
                if not zeros
            }
        arguments = _sum({**inputs, **between}, set(piece.inputs))
        ahead = fetched if isinstance(piece, Loop) and piece.num_turns > 1 else 0
        total = sum(inputs.values()) + sum(between.values())
        found.append(Held(total - arguments + ahead, sum(between.values()) + fetched + ahead, sum(on_host.values())))
        results = [name for name in piece.outputs if name not in on_host]
        between |= {name: device_bytes(programs.form(name), executable) for name in results}
        for name in unread:
            between.pop(name, None)
            on_host.pop(name, None)
    return found


def device_bytes(form: Form, executable: SplitExecutable) -> int:
    """Bytes of one device's part of an array, without padding."""
    shape = form.sharding(executable.mesh).shard_shape(form.shape)
    return math.prod(shape) * form.dtype.itemsize


def _sum(sizes: dict[str, int], names: Collection[str]) -> int:
    return sum(size for name, size in sizes.items() if name in names)
