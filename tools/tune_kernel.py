"""Finds the best block sizes of a kernel for a TPU, and writes the table that the kernel reads.

    ./bazelw run //tools:tune_kernel -- --kernel=splash_attention --generation=v6e [--shapes=REGEX] [--output=FOLDER]

Every combination of block sizes that fits the vector memory is compiled. On a machine with that TPU each is timed.
Anywhere else they are ranked by the compiler's own estimate: the cycles of its schedule for one grid step, times the
number of steps that compute. That ignores waits for memory, so it is a ranking and no prediction.

Tables lie in titan/kernels/tiles when this is run in the repository. Elsewhere name a folder, and tell runs of it:
TITAN_TILE_TABLES=FOLDER. A shape that was tuned before is tuned anew; other entries of the table stay.
"""

import argparse
import importlib
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from titan.core.hardware import HARDWARE

KERNELS = ("splash_attention", "fused_linear_cross_entropy", "grouped_matmul")
_TIMED_CALLS = 20


def modelled_cycles(case: Any, sizes: dict[str, int], generation: str, dump_folder: pathlib.Path) -> float:
    """Cycles of the kernel by the compiler's schedule.

    Raises:
      RuntimeError: the compiler wrote no schedule of the kernel.
    """
    from titan.kernels.schedule import read_schedules
    from titan.kernels.tpu_compile import compile_for_tpu

    compile_for_tpu(case.build(sizes), *case.args, generation=generation)
    loops = {kernel.name: kernel.loop_bundles for kernel in read_schedules(dump_folder)}
    if case.hlo_name not in loops:
        found = ", ".join(loops) or "none"
        raise RuntimeError(
            f"the compiler wrote no schedule of {case.hlo_name}, but of {found}; is libtpu another version?"
        )
    return float(loops[case.hlo_name] * case.num_steps(sizes))


def timed_seconds(
    function: Callable[..., Any], args: Sequence[Any], values: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> float:
    """The median wall time of a compiled call on JAX's default device; arguments are zero but for `values`."""
    import jax
    import jax.numpy as jnp

    arrays = [
        jnp.asarray(values[i], arg.dtype) if i in values else jnp.zeros(arg.shape, arg.dtype)
        for i, arg in enumerate(args)
    ]
    compiled = jax.jit(function).lower(*arrays).compile()
    jax.block_until_ready(compiled(*arrays))
    seconds = []
    for _ in range(_TIMED_CALLS):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def ranked(
    candidates: Sequence[dict[str, int]], cost: Callable[[dict[str, int]], float]
) -> list[tuple[float, dict[str, int]]]:
    """Candidates with their costs, best first; those that the compiler refuses for lack of memory are left out.

    Raises:
      RuntimeError: none is left.
    """
    import jax

    costs = []
    for sizes in candidates:
        try:
            costs.append((cost(sizes), sizes))
        except jax.errors.JaxRuntimeError as error:
            if not re.search("RESOURCE_EXHAUSTED|vmem", str(error)):
                raise
            print(f"  {sizes}: refused by the compiler")
            continue
        print(f"  {sizes}: {costs[-1][0]:.4g}", flush=True)
    if not costs:
        raise RuntimeError("no candidate compiles")
    return sorted(costs, key=lambda entry: entry[0])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", required=True, choices=KERNELS)
    parser.add_argument("--generation", required=True, choices=tuple(HARDWARE), help="The TPU to tune for.")
    parser.add_argument("--shapes", default="", help="Regular expression; only keys and passes that match are tuned.")
    parser.add_argument("--output", type=pathlib.Path, help="Folder of the tables.")
    arguments = parser.parse_args(argv)
    try:
        re.compile(arguments.shapes)
    except re.error as error:
        parser.error(f"--shapes: {arguments.shapes!r} is no regular expression: {error}")
    workspace = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
    if arguments.output is None and workspace:
        arguments.output = pathlib.Path(workspace, "titan", "kernels", "tiles")
    if arguments.output is None:
        parser.error("--output: name a folder for the tables (only `bazel run` in the repository knows a default)")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Runs the program on the command line's arguments."""
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        dump_folder = pathlib.Path(folder)
        from titan.kernels.schedule import dump_flags

        # libtpu reads it once, when it is loaded.
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump_flags(dump_folder)}"
        return _tune(arguments, dump_folder)


def _tune(arguments: argparse.Namespace, dump_folder: pathlib.Path) -> int:
    from titan.core.hardware import accelerator_present

    if not accelerator_present():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from titan.kernels.target import current_target
    from titan.kernels.tile_table import file_name, read_table, write_table

    generation = arguments.generation
    present = current_target().generation == generation
    cases = [
        case
        for case in importlib.import_module(f"titan.kernels.{arguments.kernel}.tuning").tuning_cases(generation)
        if re.search(arguments.shapes, f"{case.key} {case.pass_name}")
    ]
    if not cases:
        print(f"--shapes: {arguments.shapes!r} matches no shape of {arguments.kernel}", file=sys.stderr)
        return 2
    for case in cases:
        unit = "seconds, timed" if present else "cycles, by the compiler's schedule"
        print(f"{case.kernel} {case.key} {case.pass_name} on {generation}: {len(case.candidates)} candidates, {unit}")

        def cost(sizes: dict[str, int], case: Any = case) -> float:
            if present:
                return timed_seconds(case.build(sizes), case.args, case.values)
            return modelled_cycles(case, sizes, generation, dump_folder)

        best_cost, best = ranked(case.candidates, cost)[0]
        path = arguments.output / file_name(case.kernel, generation)
        table = dict(read_table(path))
        table[case.key] = {**table.get(case.key, {}), **best}
        write_table(path, table)
        print(f"best: {best} ({best_cost:.4g} {unit.split(',')[0]}); written to {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
