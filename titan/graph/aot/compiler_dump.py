"""What XLA:TPU writes of a compilation: optimized HLO and buffer assignment, also of a program that does not fit.

The files are asked for by XLA's own options, per compilation. The compiler that makes the program prints them, so they
can be read where `jax.stages.Compiled.as_text()` fails because libtpu is newer than jaxlib. Format: libtpu 0.0.42.
"""

import dataclasses
import pathlib

_SUFFIXES = {
    "hlo": "after_optimizations.txt",
    "code": "after_codegen.txt",
    "assignment": "after_optimizations-buffer-assignment.txt",
    "live_ranges": "after_optimizations-live-range.txt",
}


@dataclasses.dataclass(frozen=True)
class CompilerDump:
    """The texts of one compilation; "" for one that was not written.

    Attributes:
      hlo: optimized and scheduled.
      code: the same after code generation, with estimates of cycles; not written if the program does not fit.
      assignment: which values share which memory.
      live_ranges: from when to when each value is needed, in steps of the schedule.
      stablehlo_bytes: size of the text of the StableHLO that the compiler was given, with its locations.
    """

    hlo: str
    code: str
    assignment: str
    live_ranges: str
    stablehlo_bytes: int = 0


def dump_options(folder: pathlib.Path) -> dict[str, object]:
    """The compiler options that have the files written to `folder`. They do not change the program."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def read_dump(folder: pathlib.Path) -> CompilerDump:
    """The files of the one program compiled with `dump_options(folder)`."""
    texts = dict.fromkeys(_SUFFIXES, "")
    for name, suffix in _SUFFIXES.items():
        for path in sorted(folder.glob(f"*.{suffix}")):
            texts[name] = path.read_text(encoding="utf-8", errors="replace")
    return CompilerDump(**texts, stablehlo_bytes=sum(path.stat().st_size for path in folder.glob("*/module.mlir")))
