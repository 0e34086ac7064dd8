"""Seconds from launch to the first training step of the recipe llama3_debug, and where they go.

    ./bazelw run //tools/bench:startup

Starts the recipe in fresh processes: once with empty caches, then again with the caches that this left. The last line
is `RESULT {json}`; all but counts are seconds:

    import_s               import of all modules of titan.train and of what they need; median of fresh processes
    capture_s              capture of the training step as one graph; median over all starts, as for the next three
    spmd_check_s           capture as another rank, and the comparison of the two graphs
    passes_s               graph passes
    lower_s                the graph to StableHLO
    compile_s              the XLA compiler, in the first start
    first_start_s          launch to first step computed, caches empty: a tokenizer is trained and the corpus tokenised
    second_start_s         launch to first step computed, caches warm; median of the later starts
    second_compile_s       loading the compiled step from the cache; median of the later starts
    second_start_compiles  programs that a later start added to the compile cache, which keeps every program; 0 is right
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

_RECIPE = "titan.train.recipes.llama3_debug"
_STAGES = ("capture", "spmd_check", "passes", "lower", "compile")

# All modules but tests and what only tests import; prints the time it took.
_IMPORT_ALL = """
import time
start = time.perf_counter()
import importlib, pkgutil
import titan.train
for module in pkgutil.walk_packages(titan.train.__path__, "titan.train."):
    if not module.name.endswith(("_test", "_for_test", "conftest")):
        importlib.import_module(module.name)
import grain, orbax.checkpoint, psutil, tokenizers  # which titan imports in functions, when they are needed
print(time.perf_counter() - start)
"""


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of the recipe.

    Attributes:
      seconds: launch to first step computed.
      stages: seconds of each stage.
      compiles: programs new in the compile cache.
    """

    seconds: float
    stages: dict[str, float]
    compiles: int


def start_recipe(caches: pathlib.Path, folder: pathlib.Path) -> Start:
    """Trains the recipe for two steps in a fresh process.

    Args:
      caches: folder of the compile and tokenizer caches.
      folder: the run's folder; a new one, so that nothing is resumed.
    """
    compile_cache = caches / "compile"
    before = _programs(compile_cache)
    launched_at = time.time()
    _python(
        "-m",
        _RECIPE,
        "--training.steps=2",
        "--training.validation_interval=0",
        "--lr_schedule.warmup_steps=1",
        f"--compile.cache_folder={compile_cache}",
        f"--tokenizer.cache_folder={caches / 'tokenizers'}",
        f"--checkpoint.folder={folder}",
    )
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return Start(
        seconds=summary["first_step_at"] - launched_at,
        stages={stage: summary[f"{stage}_seconds"] for stage in _STAGES},
        compiles=len(_programs(compile_cache) - before),
    )


def result(imports: list[float], first: Start, later: list[Start]) -> dict[str, float]:
    """The numbers of the `RESULT` line."""
    numbers = {"import_s": statistics.median(imports)}
    for stage in _STAGES[:-1]:
        numbers[f"{stage}_s"] = statistics.median(start.stages[stage] for start in (first, *later))
    return {
        **numbers,
        "compile_s": first.stages["compile"],
        "first_start_s": first.seconds,
        "second_start_s": statistics.median(start.seconds for start in later),
        "second_compile_s": statistics.median(start.stages["compile"] for start in later),
        "first_start_compiles": first.compiles,
        "second_start_compiles": max(start.compiles for start in later),
    }


def _programs(compile_cache: pathlib.Path) -> set[str]:
    """The names of the compiled programs in JAX's cache on disk, which holds other files too."""
    return {path.name for path in compile_cache.glob("*-cache")}


def _python(*arguments: str) -> str:
    """Standard output of a fresh interpreter with this one's import path; ends the program where that fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{sys.executable} {' '.join(arguments)} ended with code {done.returncode}")
    return done.stdout


def main() -> None:
    """Runs the program on the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="Imports, and starts with warm caches.")
    repeats = parser.parse_args().repeats
    if repeats < 1:
        parser.error(f"--repeats: {repeats} leaves nothing to measure; give at least 1")
    imports = [float(_python("-c", _IMPORT_ALL)) for _ in range(repeats)]
    with tempfile.TemporaryDirectory() as folder:
        caches = pathlib.Path(folder, "caches")
        first, *later = (start_recipe(caches, pathlib.Path(folder, f"run{index}")) for index in range(repeats + 1))
    if not first.compiles:
        sys.exit("the first start left no program in the compile cache, so counting the second start's says nothing")
    print("RESULT " + json.dumps({name: round(value, 4) for name, value in result(imports, first, later).items()}))


if __name__ == "__main__":
    main()
