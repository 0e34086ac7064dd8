"""What ahead-of-time compilation reports of a training step: plain data, written as JSON and read back."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from titan.graph.aot.collectives import CollectiveGroup


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One of the largest buffers, or several that are alike in all but the number of their layer.

    Attributes:
      bytes: of all of them, with padding.
      count: how many.
      shape: of one, such as "bf16[8192,4096]".
      kind: "gathered parameters", "saved activations", "gradients" or "temporaries".
      made_by: module, region and operation that make it.
    """

    bytes: int
    count: int
    shape: str
    kind: str
    made_by: str


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one device. All numbers are bytes.

    Attributes:
      capacity: what the compiler lets a program have.
      needed: the most in use at a time, as the compiler states it; of a program that does not fit, what it would be.
      fits: whether the program was compiled, which it is only if it fits.
      parameters, optimizer_state, batch: the step's arguments, without padding.
      at_peak: temporaries by kind, where the most of them are live, by the compiler's buffer assignment. Together with
        the arguments they are less than `needed` by fragmentation, padding and what is reserved.
      program: code, not part of `needed`; None of a program that does not fit.
      host: in the host's memory; None of a program that does not fit.
      timeline: temporaries by kind over the schedule, in up to a few hundred stretches of equal length; of each where
        the most are in use.
      largest: the largest of the temporaries at the peak, the largest first.
      advice: what to change, where the program does not fit.
    """

    capacity: int
    needed: int
    fits: bool
    parameters: int
    optimizer_state: int
    batch: int
    at_peak: dict[str, int]
    program: int | None
    host: int | None
    timeline: dict[str, tuple[int, ...]]
    largest: tuple[Buffer, ...]
    advice: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Compute:
    """Work of one step.

    Attributes:
      model_flops: FLOPs that the model needs on all devices, without recompute (causal attention at half).
      compiled_flops: FLOPs of the compiled program on all devices, by the shapes of its matrix products, as often as
        loops run them, and by what kernels declare; None where the compiler wrote no program.
      hbm_bytes: memory traffic of one device by XLA's cost analysis, which counts a loop's body once; None of a program
        that does not fit.
      kernels: Mosaic kernels by name, how often each is called.
      stablehlo_bytes: size of the program as it was given to the compiler, in text.
    """

    model_flops: float
    compiled_flops: float | None
    hbm_bytes: float | None
    kernels: dict[str, int]
    stablehlo_bytes: int


@dataclasses.dataclass(frozen=True)
class ModelledTime:
    """One step's time by the model of `titan.graph.aot.timing`: no measurement.

    Attributes:
      step_seconds: of the whole step.
      matmuls, other, kernels, exposed_collectives: the seconds that it is made of.
      tokens_per_second_per_chip: at that time.
      mfu: model FLOPs at that time, as a fraction of the chips' peak.
      undeclared_kernels: those that declare no cost. Splash attention among them is charged with the matrix products
        of attention that it makes, all others with nothing.
    """

    step_seconds: float
    matmuls: float
    other: float
    kernels: float
    exposed_collectives: float
    tokens_per_second_per_chip: float
    mfu: float
    undeclared_kernels: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ProgramOfStep:
    """One of the programs of a split step.

    Attributes:
      name: what it does.
      calls: how often it runs in one step.
      peak: bytes in use on a device while it runs, what is held for other programs included.
      held: the part of these that its arguments, results and temporaries are not.
      compile_seconds: time in the compiler, when it was compiled.
      was_kept: whether an earlier run compiled it.
    """

    name: str
    calls: int
    peak: int
    held: int
    compile_seconds: float
    was_kept: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """One compiled training step.

    Attributes:
      name: of the run.
      hardware: the slice.
      mesh: the axes, in words.
      num_devices, num_chips: of all slices.
      batch_size, sequence_length: sequences in one step over all devices, and tokens in each.
      compiler_options: given to the compiler beyond its defaults, by name.
      memory, collectives, compute: see there.
      modelled: see there; None of a program that does not fit.
      seconds: wall time by stage: capture, spmd_check, passes, lower, compile.
      versions: of the packages that decide what the program is.
      missing: what could not be found out, and why.
      programs: of a split step, of which all other numbers are sums over the calls of all programs, and the memory is
        that of the program during which the most is in use; empty of a step that is one program.
    """

    name: str
    hardware: str
    mesh: str
    num_devices: int
    num_chips: int
    batch_size: int
    sequence_length: int
    compiler_options: dict[str, str]
    memory: Memory
    collectives: tuple[CollectiveGroup, ...]
    compute: Compute
    modelled: ModelledTime | None
    seconds: dict[str, float]
    versions: dict[str, str]
    missing: tuple[str, ...]
    programs: tuple[ProgramOfStep, ...] = ()


def to_json(report: Report) -> str:
    """The report as JSON, its fields in the order of the dataclasses."""
    return json.dumps(dataclasses.asdict(report), indent=2) + "\n"


def from_json(text: str) -> Report:
    """The report that `to_json` wrote.

    Raises:
      ValueError: the text is no JSON, or no report of this version.
    """
    try:
        return _read(Report, json.loads(text))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no report of this version: {error!r}") from error


def _read(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise KeyError(*sorted(unknown))
        return kind(**{name: _read(hint, value[name]) for name, hint in hints.items()})
    if typing.get_origin(kind) is tuple:
        return tuple(_read(typing.get_args(kind)[0], element) for element in value)
    if typing.get_origin(kind) is dict:
        return {name: _read(typing.get_args(kind)[1], entry) for name, entry in value.items()}
    if isinstance(kind, types.UnionType):
        return None if value is None else _read(typing.get_args(kind)[0], value)
    return kind(value)


def differences(old: Report, new: Report) -> list[str]:
    """Where two reports differ, one line each: the field, both values and, of numbers, the ratio."""
    before, after = _flat(dataclasses.asdict(old)), _flat(dataclasses.asdict(new))
    lines = []
    for name in [*before, *(name for name in after if name not in before)]:
        a, b = before.get(name), after.get(name)
        if a == b or name.startswith(("memory.largest", "memory.timeline", "seconds.")):
            continue
        is_ratio = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b)) and a
        lines.append(f"{name}: {_show(a)} -> {_show(b)}" + (f"  ({b / a:.3f}x)" if is_ratio else ""))
    return lines


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        items = value.items()
    elif path == "collectives":
        # By what they are, so that a new row does not shift all others.
        return {
            f"{path}.{row['axes']}.{row['kind']}{'.async' * row['asynchronous']}{'.loop' * row['in_loop']}.{name}": row[
                name
            ]
            for row in value
            for name in ("count", "bytes")
        }
    elif isinstance(value, (tuple, list)):
        items = enumerate(value)
    else:
        return {path: value}
    flat: dict[str, Any] = {}
    for name, entry in items:
        flat |= _flat(entry, f"{path}.{name}" if path else str(name))
    return flat


def _show(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
