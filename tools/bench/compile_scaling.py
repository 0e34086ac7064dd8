"""How compilation grows with depth: layers unrolled, scanned, or split into programs of their own.

    ./bazelw run //tools/bench:compile_scaling -- [--layers=2,8,32,126] [--modes=unrolled,scan,split]

Compiles Llama 3 of the width of 8B ahead of time for a slice, at each depth and in each mode, each in a process of its
own. A row each: wall seconds of capture (with its check and the passes), lowering and XLA; CPU seconds of the
process, imports included, which depend less on other load of the machine; size of the StableHLO and of the generated
code; peak memory of a device. A mode goes no deeper than the first depth that exceeds --timeout. The last line is
`RESULT {json}`, the deepest over the shallowest where both are there:

    scan_126_over_2, split_126_over_2    seconds of capture, lowering and XLA
    program_126_over_2                   bytes of generated code, scanned
    ..._cpu_..., ..._stablehlo_...       the same of CPU seconds and of bytes of StableHLO
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence

from titan.core.config.tree import leaves
from titan.train.config.run import Config
from tools.bench.aot_run import AotRun, aot_run

MODES = {
    "unrolled": (),
    "scan": ("--tpu_config.use_scan_layers",),
    "split": ("--tpu_config.use_graph_split",),
}
"""Mode to the flags that ask for it."""

_RECIPE = "llama3_8b"
_HEADER = (
    f"{'mode':10}{'layers':>7}{'capture s':>11}{'lower s':>9}{'XLA s':>8}{'all s':>8}{'CPU s':>8}{'StableHLO MB':>14}"
    f"{'code MB':>9}{'peak GiB':>10}"
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One compilation that ended.

    Attributes:
      seconds: wall time of all stages.
      cpu_seconds: of the process.
      stablehlo_bytes: of the program as text.
      program_bytes: generated code; 0 of a program that does not fit.
    """

    seconds: float
    cpu_seconds: float
    stablehlo_bytes: int
    program_bytes: int


def known_modes() -> list[str]:
    """The modes whose flags this version has."""
    paths = {leaf.path for leaf in leaves(Config())}
    return [mode for mode, flags in MODES.items() if all(flag.removeprefix("--") in paths for flag in flags)]


def row_of(run: AotRun) -> Row:
    """The row of a run that has a report."""
    report = run.report
    return Row(run.compile_seconds, run.cpu_seconds, report.compute.stablehlo_bytes, report.memory.program or 0)


def result(rows: Mapping[str, Mapping[int, Row]], layers: Sequence[int]) -> dict[str, float]:
    """The numbers of the `RESULT` line, from each mode's rows by number of layers."""
    first, last = min(layers), max(layers)
    over = f"{last}_over_{first}"
    numbers: dict[str, float] = {}
    for mode, by_depth in rows.items():
        for depth, row in by_depth.items():
            numbers |= {f"{mode}_{depth}_s": row.seconds, f"{mode}_{depth}_cpu_s": row.cpu_seconds}
        if not {first, last} <= by_depth.keys() or first == last:
            continue
        shallow, deep = by_depth[first], by_depth[last]
        numbers[f"{mode}_{over}"] = deep.seconds / shallow.seconds
        numbers[f"{mode}_cpu_{over}"] = deep.cpu_seconds / shallow.cpu_seconds
        numbers[f"{mode}_stablehlo_{over}"] = deep.stablehlo_bytes / shallow.stablehlo_bytes
        if mode == "scan" and shallow.program_bytes:
            numbers[f"program_{over}"] = deep.program_bytes / shallow.program_bytes
    return {name: round(value, 4) for name, value in numbers.items()}


def _text(mode: str, depth: int, run: AotRun) -> str:
    if run.report is None:
        return f"{mode:10}{depth:7}  {run.failure}"
    seconds, memory, row = run.report.seconds, run.report.memory, row_of(run)
    capture = row.seconds - seconds["lower"] - seconds["compile"]
    return (
        f"{mode:10}{depth:7}{capture:11.1f}{seconds['lower']:9.1f}{seconds['compile']:8.1f}{row.seconds:8.1f}"
        f"{row.cpu_seconds:8.1f}{row.stablehlo_bytes / 1e6:14.2f}{row.program_bytes / 1e6:9.2f}"
        f"{memory.needed / 2**30:10.2f}{'' if memory.fits else '  does not fit'}"
    )


def main() -> None:
    """Runs the program on the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = known_modes()
    parser.add_argument("--layers", default="2,8,32,126", help="Numbers of layers, separated by commas.")
    parser.add_argument("--modes", default=",".join(modes), help="Modes, separated by commas.")
    parser.add_argument("--hardware", default="v6e-8x8", help="The slice; its memory is that of 126 layers and more.")
    parser.add_argument("--batch_size", type=int, default=64, help="Sequences in a step.")
    parser.add_argument("--sequence_length", type=int, default=4096, help="Tokens of each.")
    parser.add_argument("--timeout", type=float, default=1200, help="Seconds that one compilation may take.")
    parser.add_argument(
        "--flags", default="--compile.memory_policy=full", help="More flags of the recipe, separated by blanks."
    )
    arguments = parser.parse_args()
    for mode in arguments.modes.split(","):
        if mode not in modes:
            parser.error(f"--modes: {mode!r} is unknown; give some of {', '.join(modes)}")
    try:
        layers = sorted({int(number) for number in arguments.layers.split(",")})
    except ValueError:
        parser.error(f"--layers: {arguments.layers!r} is no list of numbers; write it as 2,8,32")
    if layers[0] < 1:
        parser.error(f"--layers: {layers[0]} layers are none; give at least 1")
    print(_HEADER, flush=True)
    rows: dict[str, dict[int, Row]] = {}
    for mode in arguments.modes.split(","):
        rows[mode] = {}
        for depth in layers:
            flags = (
                f"--hardware={arguments.hardware}",
                f"--training.batch_size={arguments.batch_size}",
                f"--training.sequence_length={arguments.sequence_length}",
                f"--model.num_layers={depth}",
                *MODES[mode],
                *arguments.flags.split(),
            )
            run = aot_run(_RECIPE, flags, arguments.timeout)
            print(_text(mode, depth, run), flush=True)
            if run.report is None:
                break
            rows[mode][depth] = row_of(run)
    print("RESULT " + json.dumps(result(rows, layers)))


if __name__ == "__main__":
    main()
