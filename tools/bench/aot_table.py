"""Every recipe on every slice that it has a variant for, compiled ahead of time: whether it fits, and how fast.

    ./bazelw run //tools/bench:aot_table -- [--rows=llama3_405b:tpu7x-4x4x8,...] [--markdown=FILE]

A row each, in a process of its own: whether the step fits and the peak memory of a device; wall seconds of capture
(with its check and the passes), lowering and XLA; the most memory that the process held on this machine; modelled MFU,
published MFU and the error of the model against it. Where tokens per second and chip are published and no MFU, the
error is that of the tokens. A row that fails says why. The last line is `RESULT {json}`:

    rows, failed, fitting     how many
    mean_abs_mfu_error        of the rows that something is published for
    RECIPE@SLICE_...          fits, peak_gib, seconds, rss_gb, mfu of each row
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Iterable

from titan.graph.aot.report import Report
from titan.train.recipes.registry import RECIPES
from tools.bench.aot_run import AotRun, aot_run
from tools.bench.published_mfu import PUBLISHED, Published

_COLUMNS = (
    *("recipe", "slice", "batch", "fits", "peak GiB", "of", "capture s", "lower s", "XLA s", "RSS GB"),
    *("modelled MFU", "tokens/s/chip", "published", "error"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One recipe on one slice.

    Attributes:
      recipe, hardware: what was compiled, and for what.
      run: what became of it.
    """

    recipe: str
    hardware: str
    run: AotRun

    @property
    def name(self) -> str:
        """Such as "llama3_8b@v6e-2x4"."""
        return f"{self.recipe}@{self.hardware}"

    @property
    def error(self) -> float | None:
        """The modelled speed over the published one, less 1; None where there is not both."""
        published, report = PUBLISHED.get((self.recipe, self.hardware)), self.run.report
        if published is None or report is None or report.modelled is None:
            return None
        return relative_error(published, report)


def relative_error(published: Published, report: Report) -> float:
    """The modelled MFU (or tokens per second and chip, if only those are published) over the published, less 1."""
    if published.mfu is not None:
        return report.modelled.mfu / published.mfu - 1
    return report.modelled.tokens_per_second_per_chip / published.tokens_per_second_per_chip - 1


def all_pairs() -> list[tuple[str, str]]:
    """Each recipe with each slice of its `VARIANTS`."""
    return [(name, hardware) for name, recipe in RECIPES.items() for hardware in recipe.variants]


def cells(row: Row) -> list[str]:
    """The row as text, a cell for each column; one that failed has the reason in place of its numbers."""
    report = row.run.report
    if report is None:
        return [row.recipe, row.hardware, "", row.run.failure]
    memory, seconds, modelled = report.memory, report.seconds, report.modelled
    published, error = PUBLISHED.get((row.recipe, row.hardware)), row.error
    return [
        row.recipe,
        row.hardware,
        f"{report.batch_size} x {report.sequence_length}",
        "yes" if memory.fits else "no",
        f"{memory.needed / 2**30:.1f}",
        f"{memory.capacity / 2**30:.1f}",
        f"{row.run.compile_seconds - seconds['lower'] - seconds['compile']:.0f}",
        f"{seconds['lower']:.0f}",
        f"{seconds['compile']:.0f}",
        f"{row.run.peak_rss_bytes / 1e9:.1f}",
        f"{modelled.mfu:.1%}" if modelled else "-",
        f"{modelled.tokens_per_second_per_chip:,.0f}" if modelled else "-",
        _published_text(published) if published else "-",
        f"{error:+.0%}" if error is not None else "-",
    ]


def _published_text(published: Published) -> str:
    if published.mfu is not None:
        return f"{published.mfu:.1%}"
    return f"{published.tokens_per_second_per_chip:,.0f} tokens/s/chip"


def to_markdown(rows: Iterable[Row]) -> str:
    """The table for the documentation."""
    lines = [_COLUMNS, ["---"] * len(_COLUMNS), *(cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def result(rows: Iterable[Row]) -> dict[str, float]:
    """The numbers of the `RESULT` line."""
    rows = list(rows)
    reports = {row.name: row.run.report for row in rows if row.run.report}
    errors = [abs(row.error) for row in rows if row.error is not None]
    numbers: dict[str, float] = {
        "rows": len(rows),
        "failed": len(rows) - len(reports),
        "fitting": sum(report.memory.fits for report in reports.values()),
    }
    if errors:
        numbers["mean_abs_mfu_error"] = sum(errors) / len(errors)
    for row in rows:
        if report := row.run.report:
            numbers |= {
                f"{row.name}_fits": int(report.memory.fits),
                f"{row.name}_peak_gib": report.memory.needed / 2**30,
                f"{row.name}_seconds": row.run.compile_seconds,
                f"{row.name}_rss_gb": row.run.peak_rss_bytes / 1e9,
            }
            if report.modelled:
                numbers[f"{row.name}_mfu"] = report.modelled.mfu
    return {name: round(value, 4) for name, value in numbers.items()}


def _pairs(rows: str) -> list[tuple[str, str]]:
    """The pairs that --rows names: a recipe with all its slices, or with one after a colon."""
    known = all_pairs()
    pairs = []
    for name in rows.split(","):
        recipe, _, hardware = name.partition(":")
        found = [(recipe, hardware)] if hardware else [pair for pair in known if pair[0] == recipe]
        if not found:
            raise ValueError(f"{recipe!r} has no variants; give recipe:slice, or some of {_names(known)}")
        pairs += found
    return pairs


def _names(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{recipe}:{hardware}" for recipe, hardware in pairs)


def main() -> None:
    """Runs the program on the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", default="", help="recipe:slice or recipe, separated by commas; empty: every recipe on all its slices."
    )
    parser.add_argument("--flags", default="", help="More flags of the recipes, separated by blanks.")
    parser.add_argument("--timeout", type=float, default=1800, help="Seconds that one compilation may take.")
    parser.add_argument("--markdown", default="", help="File to write the table to.")
    arguments = parser.parse_args()
    try:
        pairs = _pairs(arguments.rows) if arguments.rows else all_pairs()
    except ValueError as error:
        parser.error(f"--rows: {error}")
    print(" | ".join(_COLUMNS), flush=True)
    rows = []
    for recipe, hardware in pairs:
        run = aot_run(recipe, (f"--hardware={hardware}", *arguments.flags.split()), arguments.timeout)
        rows.append(Row(recipe, hardware, run))
        print(" | ".join(cells(rows[-1])), flush=True)
    if arguments.markdown:
        path = pathlib.Path(arguments.markdown).expanduser()
        path.write_text(to_markdown(rows), encoding="utf-8")
        print(f"table: {path}")
    print("RESULT " + json.dumps(result(rows)))


if __name__ == "__main__":
    main()
