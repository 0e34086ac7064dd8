"""The TPU compiler's schedule of a Mosaic kernel, as far as it tells how long a grid step takes.

The compiler ends with VLIW bundles, one issued a cycle, and can write them to files. Bundles inside the kernel's grid
loop are the cycles that one grid step computes for, provided that its data has arrived. All branches count, taken or
not. It is the compiler's estimate, not a measurement; it ranks block sizes, which change how well the loop fills the
matrix unit and how often it starts anew.

libtpu takes the flags when it is loaded, once for the process: `LIBTPU_INIT_ARGS = dump_flags(folder)`, then compile,
then `read_schedules(folder)`. Format of the files: libtpu 0.0.42.
"""

import dataclasses
import pathlib
import re

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?:?\s*:?\s*(?P<depth>[> ]*)\{")
_INSTRUCTION = re.compile(r"/\* entry bundle: %(?P<name>[\w.\-]+) = custom-call\(")


@dataclasses.dataclass(frozen=True)
class KernelSchedule:
    """The schedule of one kernel.

    Attributes:
      name: of the HLO instruction, without its number: the kernel's own name.
      loop_bundles: within the grid loop (a kernel without a grid has none).
    """

    name: str
    loop_bundles: int


def dump_flags(folder: pathlib.Path) -> str:
    """What LIBTPU_INIT_ARGS must hold for the final bundles of every program to be written to `folder`."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"


def read_schedules(folder: pathlib.Path) -> list[KernelSchedule]:
    """The Mosaic kernels among the files in `folder`, which are deleted."""
    schedules = []
    for path in sorted(folder.iterdir()):
        if path.name.endswith("-final_bundles.txt") and "schedule-analysis" not in path.name:
            schedule = parse_bundles(path.read_text())
            if schedule is not None:
                schedules.append(schedule)
        path.unlink()
    return schedules


def parse_bundles(text: str) -> KernelSchedule | None:
    """The schedule in a file of final bundles; None if it is no Mosaic kernel's."""
    instruction = _INSTRUCTION.search(text)
    if instruction is None:
        return None
    depths = [match.group("depth") for match in map(_BUNDLE.match, text.splitlines()) if match]
    return KernelSchedule(
        name=re.sub(r"\.\d+$", "", instruction.group("name")),
        loop_bundles=sum(">" in depth for depth in depths),
    )
