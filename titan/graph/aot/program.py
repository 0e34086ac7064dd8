"""What the compiler says of one program, as plain data that can be kept on disk."""

import dataclasses
import gzip
import json
import os
import pathlib
import tempfile
from typing import Any

from titan.graph.aot.compiler_dump import CompilerDump


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """One compilation.

    Attributes:
      dump: the texts that the compiler wrote.
      fits: whether the program alone fits into a device's memory, so that it was compiled.
      needed_bytes: device memory at the program's peak, arguments and results included; of one that does not fit, what
        it would be.
      code_bytes: of the program itself; None of one that does not fit, as for the next two.
      host_bytes: of temporaries and arguments in host memory.
      traffic_bytes: memory traffic of one device, by XLA's cost analysis.
      compile_seconds: time in the compiler, when it was compiled.
      was_kept: whether it was compiled by an earlier run.
    """

    dump: CompilerDump
    fits: bool
    needed_bytes: int
    code_bytes: int | None
    host_bytes: int | None
    traffic_bytes: float | None
    compile_seconds: float
    was_kept: bool = False


def compiled_program(compiled: Any, dump: CompilerDump, compile_seconds: float) -> CompiledProgram:
    """The data of a program that fits.

    Args:
      compiled: `jax.stages.Compiled`.
      dump: of the compilation.
      compile_seconds: that it took.
    """
    stats = compiled.memory_analysis()
    return CompiledProgram(
        dump,
        True,
        stats.peak_memory_in_bytes,
        stats.generated_code_size_in_bytes,
        stats.host_temp_size_in_bytes + stats.host_argument_size_in_bytes,
        compiled.cost_analysis().get("bytes accessed"),
        compile_seconds,
    )


def write_program(path: pathlib.Path, program: CompiledProgram) -> None:
    """Keeps a program's data; the file appears at once as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = gzip.compress(json.dumps(dataclasses.asdict(program)).encode(), compresslevel=3)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def read_program(path: pathlib.Path) -> CompiledProgram | None:
    """What `write_program` kept; None where there is no such file, or one that is damaged."""
    try:
        fields = json.loads(gzip.decompress(path.read_bytes()))
        return CompiledProgram(**{**fields, "dump": CompilerDump(**fields["dump"]), "was_kept": True})
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
