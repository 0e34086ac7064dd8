"""The collectives of a compiled program, by mesh axis: how many, how large, asynchronous or not, in a loop or not."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable

from titan.graph.aot.hlo import HloModule, Instruction
from titan.parallel.mesh import MeshSpec

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
"""Opcodes of collectives, less the suffix "-start" of their asynchronous forms."""

_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


@dataclasses.dataclass(frozen=True)
class CollectiveGroup:
    """Collectives of one kind over the same mesh axes.

    Attributes:
      axes: names of the mesh axes, joined by " x "; "between slices" for what goes over the data-centre network.
      kind: "all-gather", "reduce-scatter", ...
      count: instructions.
      bytes: that one device gets (all-gather, all-to-all, permute) or puts in (reduce-scatter, all-reduce), each
        instruction once, without padding.
      asynchronous: whether computation may be scheduled between start and end.
      in_loop: whether they are part of a loop's body, and run once for each turn.
    """

    axes: str
    kind: str
    count: int
    bytes: int
    asynchronous: bool
    in_loop: bool


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
      instruction: of the module.
      computation: that the instruction is in.
      kind, axes, bytes, asynchronous, in_loop: see `CollectiveGroup`.
    """

    instruction: Instruction
    computation: str
    kind: str
    axes: str
    bytes: int
    asynchronous: bool
    in_loop: bool


def find_collectives(module: HloModule, mesh: MeshSpec) -> list[Collective]:
    """The collectives of a program that was compiled for `mesh`, in the order of the text."""
    found = []
    chains: set[str] = set()
    for computation, instruction in module.instructions():
        kind = instruction.opcode.removesuffix("-start")
        if kind == "send":
            kind = _between_slices(instruction)
            axes = "between slices"
        elif kind in KINDS:
            axes = _axes(instruction, mesh)
        else:
            continue
        if not kind:
            continue
        callers = list(module.calls_to(computation))
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # XLA:TPU's own form: an all-reduce of which each device computes its slice alone
        started = any(name.endswith("-start") for name in (instruction.opcode, *(caller.opcode for caller in callers)))
        chain = _CHAIN.search(instruction.attributes)
        if chain:
            # One that overlaps with computation stands in each fusion that carries a part of it, under one chain.
            if chain[1] in chains:
                continue
            chains.add(chain[1])
        found.append(
            Collective(
                instruction,
                computation,
                kind,
                axes,
                _bytes(module, computation, instruction, kind),
                bool(chain) or started,
                any(caller.opcode == "while" for caller in callers),
            )
        )
    return found


def group_collectives(found: Iterable[Collective]) -> tuple[CollectiveGroup, ...]:
    """Collectives counted by axes, kind and form, the most bytes first."""
    groups: dict[tuple, list[int]] = collections.defaultdict(list)
    for one in found:
        groups[one.axes, one.kind, one.asynchronous, one.in_loop].append(one.bytes)
    rows = [
        CollectiveGroup(axes, kind, len(sizes), sum(sizes), asynchronous, in_loop)
        for (axes, kind, asynchronous, in_loop), sizes in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def _between_slices(instruction: Instruction) -> str:
    match = _MEGASCALE.search(instruction.attributes)
    return match[1].lower().replace("_", "-") if match else ""


def _bytes(module: HloModule, computation: str, instruction: Instruction, kind: str) -> int:
    if kind in ("reduce-scatter", "all-reduce") and instruction.opcode != "send":
        shapes = {other.name: other for other in module.computations[computation]}
        arrays = [array for name in instruction.operands if name in shapes for array in shapes[name].arrays]
    elif instruction.opcode == kind:
        arrays = list(instruction.arrays)
    elif instruction.opcode == "send":
        arrays = list(instruction.arrays)[:1]
    else:  # the result of a start is the tuple (operands, results, context)
        arrays = list(instruction.arrays)[len(instruction.operands) :][: len(instruction.operands)]
    return sum(array.num_bytes for array in arrays)


def _axes(instruction: Instruction, mesh: MeshSpec) -> str:
    """The mesh axes along which the members of the first group differ."""
    coordinates = [_coordinates(device, mesh) for device in _first_group(instruction, mesh.num_devices)]
    names = [
        name
        for name, values in zip(mesh.axis_names, zip(*coordinates, strict=True), strict=True)
        if len(set(values)) > 1
    ]
    return " x ".join(names) or "none"


def _coordinates(device: int, mesh: MeshSpec) -> tuple[int, ...]:
    coordinates = []
    for size in reversed(mesh.axis_sizes):
        device, coordinate = divmod(device, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def _first_group(instruction: Instruction, num_devices: int) -> list[int]:
    iota = _IOTA.search(instruction.attributes)
    if iota:
        shape, dims = (tuple(map(int, text.split(","))) for text in iota.groups()[:2])
        order = tuple(map(int, iota[3].split(","))) if iota[3] else tuple(range(len(dims)))
        return _transposed_iota(dims, order, math.prod(shape[1:]))
    lists = _LISTS.search(instruction.attributes)
    groups = [list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", lists[1])] if lists else []
    return groups[0] if groups else list(range(num_devices))  # {} is one group of all


def _transposed_iota(dims: tuple[int, ...], order: tuple[int, ...], count: int) -> list[int]:
    """The first `count` elements of iota(dims).transpose(order), flat."""
    strides = [math.prod(dims[dim + 1 :]) for dim in order]
    indices = itertools.product(*(range(dims[dim]) for dim in order))
    return [sum(map(int.__mul__, index, strides)) for index in itertools.islice(indices, count)]
