"""What is kept of a compilation: the same comes back, and a file that is damaged counts as none."""

import dataclasses

import pytest

from titan.graph.aot.compiler_dump import CompilerDump
from titan.graph.aot.program import CompiledProgram, read_program, write_program

PROGRAM = CompiledProgram(CompilerDump("hlo", "code", "", "ranges", 7), True, 1000, 20, 0, 12.5, 3.25)


@pytest.mark.parametrize(
    "program", [PROGRAM, CompiledProgram(CompilerDump("", "", "", ""), False, 9, *[None] * 3, 1.0)]
)
def test_what_was_kept_comes_back(tmp_path, program):
    path = tmp_path / "folder" / "a.json.gz"
    assert read_program(path) is None
    write_program(path, program)
    assert read_program(path) == dataclasses.replace(program, was_kept=True)
    assert [one.name for one in path.parent.iterdir()] == ["a.json.gz"]


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"no gzip"])
def test_a_damaged_file_counts_as_none(tmp_path, damage):
    path = tmp_path / "a.json.gz"
    write_program(path, PROGRAM)
    path.write_bytes(damage(path.read_bytes()))
    assert read_program(path) is None
