"""titan's Llama 3 step against the same step written by hand in JAX, both compiled ahead of time for the same slice.

    ./bazelw run //tools/bench:aot_vs_jax -- [--cases=llama3_8b,llama3_70b]

Same model, batch, mesh and policy: layers scanned, each recomputed in the backward pass from its input, FSDP over all
devices with gathers in bfloat16 and reductions in float32, splash attention, AdamW in float32, clipping by the global
norm, state donated. titan's side is the recipe as a user runs it; JAX's is `jax_llama3_scan.py` with the same compiler
options. Each is compiled in a process of its own, and what the compiler says of both goes through the same code
(`titan/graph/aot`). The last line is `RESULT {json}`:

    peak_bytes, flops, modelled_seconds    ours / JAX, the largest of all cases
    CASE_...                               the same of each case, and the numbers of each side

modelled_seconds is a model's (docs/aot.md): nothing runs.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from titan.train.config.run import Config
from tools.bench.aot_run import aot_run
from tools.bench.llama3_hyperparameters import llama3_hyperparameters


@dataclasses.dataclass(frozen=True)
class Case:
    """What a recipe is compiled for.

    Attributes:
      flags: of the recipe.
      loss_chunks: of the peer, see `ScanHyperparameters`.
    """

    flags: tuple[str, ...]
    loss_chunks: int


CASES = {
    "llama3_8b": Case(("--hardware=v6e-2x4", "--training.batch_size=8", "--training.sequence_length=4096"), 1),
    "llama3_70b": Case(("--hardware=tpu7x-4x4x4", "--training.batch_size=128", "--training.sequence_length=8192"), 8),
}
"""By recipe."""

_POLICY = ("--tpu_config.use_scan_layers", "--compile.memory_policy=full")
_RATIOS = ("peak_bytes", "flops", "modelled_seconds")


@dataclasses.dataclass(frozen=True)
class Side:
    """One compiled step.

    Attributes:
      peak_bytes: the most memory of a device in use at a time.
      flops: of all devices in one step, as the optimized program computes them.
      modelled_seconds: of one step; no measurement.
      seconds: wall time by stage of the compilation.
    """

    peak_bytes: int
    flops: float
    modelled_seconds: float
    seconds: dict[str, float]


def titan_side(recipe: str, flags: Sequence[str], timeout_seconds: float) -> tuple[Side, Mapping[str, str]]:
    """The recipe's step, and the compiler options that it is compiled with. Ends the program where it does not fit."""
    run = aot_run(recipe, flags, timeout_seconds)
    report = run.report
    if report is None:
        sys.exit(f"titan's {recipe}: {run.failure}")
    if report.modelled is None:
        sys.exit(f"titan's {recipe} needs {report.memory.needed:,} bytes of {report.memory.capacity:,}: no program")
    side = Side(report.memory.needed, report.compute.compiled_flops, report.modelled.step_seconds, dict(report.seconds))
    return side, report.compiler_options


def jax_side(recipe: str, flags: Sequence[str], compiler_options: Mapping[str, str], loss_chunks: int) -> Side:
    """The hand-written step with the sizes and the batch of the recipe; run it in a process of its own."""
    import jax

    from titan.core.config.flags import parse
    from titan.graph.aot.compiler_dump import dump_options, read_dump
    from titan.kernels.tpu_topology import topology_devices
    from tools.bench.jax_llama3_scan import BATCH_TENSORS, scan_step

    config = parse([recipe, "--aot", *flags], importlib.import_module(f"titan.train.recipes.{recipe}").RECIPE)
    devices = topology_devices(config.tpu_slice.topology)
    start = time.perf_counter()
    step = scan_step(dataclasses.replace(hyperparameters(config), loss_chunks=loss_chunks), devices)
    shape = (config.training.batch_size, config.training.sequence_length)
    batch = {name: jax.ShapeDtypeStruct(shape, "int32", sharding=step.batch_sharding) for name in BATCH_TENSORS}
    with jax.default_device(devices[0]):  # the kernel is made for its generation
        lowered = step.jitted.lower(step.state, batch, jax.ShapeDtypeStruct((), "float32"))
    lowered_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = {**compiler_options, **dump_options(pathlib.Path(folder))}
        memory = lowered.compile(compiler_options=options).memory_analysis()
        compiled_at = time.perf_counter()
        dump = read_dump(pathlib.Path(folder))
    return Side(
        memory.peak_memory_in_bytes,
        *_analysed(config.resolve_devices(len(devices)), dump.hlo, dump.code),
        {"lower": lowered_at - start, "compile": compiled_at - lowered_at},
    )


def _analysed(config: Config, hlo: str, code: str) -> tuple[float, float]:
    """FLOPs and modelled seconds, by what the report of titan's own steps is made with."""
    from titan.graph.aot.collectives import find_collectives
    from titan.graph.aot.flops import program_flops
    from titan.graph.aot.hlo import parse_hlo
    from titan.graph.aot.timing import Links, step_time
    from titan.parallel.mesh import MeshSpec
    from titan.train.aot.command import undeclared_flops
    from tools.bench.jax_llama3_scan import AXIS

    tpu_slice, kernel_flops = config.tpu_slice, undeclared_flops(config)
    mesh, module = MeshSpec((AXIS,), (tpu_slice.num_devices,)), parse_hlo(code)
    links = Links(tpu_slice.hardware, tpu_slice.shape)
    time = step_time(module, find_collectives(module, mesh), links, {AXIS: mesh.num_devices}, kernel_flops)
    return program_flops(parse_hlo(hlo), kernel_flops) * mesh.num_devices, time.total


def hyperparameters(config: Config):
    """The peer's sizes and constants, those of a configuration of Llama 3."""
    from tools.bench.jax_llama3_scan import ScanHyperparameters

    model = config.model
    scaling = ()
    if model.rope_scaling == "llama3":
        scaling = (
            model.rope_scaling_factor,
            model.rope_low_frequency_factor,
            model.rope_high_frequency_factor,
            model.rope_original_max_length,
        )
    return ScanHyperparameters(
        **llama3_hyperparameters(config),
        dim=model.dim,
        ffn_dim=model.ffn_dim,
        vocab_size=model.vocab_size,
        rope_scaling=scaling,
    )


def result(sides: Mapping[str, tuple[Side, Side]]) -> dict[str, float]:
    """The numbers of the `RESULT` line, from ours and JAX's side of each case."""
    numbers: dict[str, float] = {}
    for name in _RATIOS:
        ratios = {case: getattr(ours, name) / getattr(theirs, name) for case, (ours, theirs) in sides.items()}
        numbers |= {name: max(ratios.values()), **{f"{case}_{name}": ratio for case, ratio in ratios.items()}}
    for case, pair in sides.items():
        for side, one in zip(("titan", "jax"), pair, strict=True):
            numbers |= {
                f"{case}_{side}_peak_gib": one.peak_bytes / 2**30,
                f"{case}_{side}_tflop": one.flops / 1e12,
                f"{case}_{side}_modelled_s": one.modelled_seconds,
                f"{case}_{side}_compile_s": sum(one.seconds.values()),
            }
    return {name: round(value, 4) for name, value in numbers.items()}


def _text(name: str, side: Side) -> str:
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in side.seconds.items())
    return (
        f"  {name:6} peak {side.peak_bytes / 2**30:6.2f} GiB   {side.flops:.4e} FLOPs   modelled "
        f"{side.modelled_seconds:.4f} s   seconds: {stages}"
    )


def main() -> None:
    """Runs the program on the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="Recipes, separated by commas.")
    parser.add_argument("--flags", default="", help="More flags of the recipes, separated by blanks.")
    parser.add_argument("--timeout", type=float, default=3600, help="Seconds that titan's compilation may take.")
    arguments = parser.parse_args()
    cases = arguments.cases.split(",")
    for case in cases:
        if case not in CASES:
            parser.error(f"--cases: {case!r} is unknown; give some of {', '.join(CASES)}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sides = {}
    for case in cases:
        flags = (*CASES[case].flags, *_POLICY, *arguments.flags.split())
        print(f"{case} {' '.join(flags)}", flush=True)
        ours, options = titan_side(case, flags, arguments.timeout)
        print(_text("titan", ours), flush=True)
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            theirs = pool.submit(jax_side, case, flags, options, CASES[case].loss_chunks).result()
        print(_text("JAX", theirs), flush=True)
        sides[case] = (ours, theirs)
    print("RESULT " + json.dumps(result(sides)))


if __name__ == "__main__":
    main()
