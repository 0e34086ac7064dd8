"""Ahead-of-time compilation of a run's training step for a TPU slice that is not there, and the report on it."""

import collections
import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
from collections.abc import Mapping, Sequence

from titan.core.config.validate import ConfigError
from titan.graph.aot.buffers import temporaries
from titan.graph.aot.collectives import find_collectives, group_collectives
from titan.graph.aot.flops import program_flops
from titan.graph.aot.hlo import HloModule, parse_hlo
from titan.graph.aot.html import to_html
from titan.graph.aot.kernels import count_kernels
from titan.graph.aot.memory import BETWEEN, argument_bytes, memory_of
from titan.graph.aot.out_of_memory import OutOfDeviceMemoryError
from titan.graph.aot.program import CompiledProgram
from titan.graph.aot.report import (
    Compute,
    Memory,
    ModelledTime,
    ProgramOfStep,
    Report,
    differences,
    from_json,
    to_json,
)
from titan.graph.aot.resident_bytes import Calls, Held, calls_of
from titan.graph.aot.text import to_text
from titan.graph.aot.timing import Links, step_time
from titan.graph.split.executable import SplitExecutable
from titan.train.aot.advice import advice
from titan.train.build import build
from titan.train.config.kernels import KernelSection
from titan.train.config.run import Config
from titan.train.runtime.aot import AotRuntime
from titan.train.runtime.compiled_step import Shapes
from titan.train.runtime.run import Run
from titan.train.runtime.saved_step import SavedStep, save_step
from titan.train.step.state import LEARNING_RATE, PARAMS, batch_layouts

_PACKAGES = ("jax", "jaxlib", "torch")


def main(config: Config) -> int:
    """Compiles, prints the report and writes it where the configuration says.

    Returns:
      The exit code: 0 if the step fits, 1 if it does not.
    """
    earlier = _earlier(config.aot.compare) if config.aot.compare else None
    report = compile_ahead_of_time(config)
    print(to_text(report), end="", flush=True)
    if config.aot.load:
        print(f"saved in {config.aot.load}: this step, compiled then and not now")
    if config.aot.save:
        print(f"saved: {config.aot.save}" if report.memory.fits else f"not saved in {config.aot.save}: it does not fit")
    if config.aot.report:
        path = pathlib.Path(config.aot.report).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(report), encoding="utf-8")
        print(f"report: {path}")
    if config.aot.page:
        path = pathlib.Path(config.aot.page).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_html(report), encoding="utf-8")
        print(f"page: {path}")
    if earlier:
        print(f"\nagainst {config.aot.compare}:")
        print("\n".join(f"  {line}" for line in differences(earlier, report)) or "  no difference")
    return 0 if report.memory.fits else 1


def compile_ahead_of_time(config: Config) -> Report:
    """Compiles the training step of a validated configuration for its `hardware`; no array of its size is allocated.

    The program is written to `aot.save`, with the report. With `aot.load` none is compiled: the report is the one that
    was written, if the saved program is that of this step.

    Raises:
      ConfigError: libtpu is missing, the configuration does not suit the slice, or `aot.load` holds no such report.
    """
    runtime = AotRuntime(config)
    run = build(config, runtime)
    executable = None
    with contextlib.suppress(OutOfDeviceMemoryError):  # the report says so
        executable = run.train_step.executable_for_shapes(batch_shapes(run.config))
    if runtime.saved_step:
        return _saved_report(runtime.saved_step)
    if isinstance(executable, SplitExecutable):
        return _report(run, runtime, calls_of(executable))
    report = _report(run, runtime, [Calls("", runtime.program, 1, Held(0, 0, 0))])
    if config.aot.save and executable:
        save_step(config.aot.save, executable, runtime.fingerprint, to_json(report))
    return report


def _saved_report(step: SavedStep) -> Report:
    if not step.report:
        raise ConfigError(
            "aot.load", f"{step.folder} was saved by a run, with no report", "save it with --aot --aot.save"
        )
    try:
        return from_json(step.report)
    except ValueError as error:
        raise ConfigError("aot.load", f"{step.folder}: {error}", "save it anew with --aot --aot.save") from None


def batch_shapes(config: Config) -> Shapes:
    """The shapes of one step's batch: [microbatch, row, ...], and () for the learning rate."""
    training = config.training
    rows = (training.microbatches, training.batch_size // training.microbatches)
    tensors = config.model.batch_tensors(training.sequence_length)
    return {**{tensor.name: (*rows, *tensor.shape) for tensor in tensors}, LEARNING_RATE: ()}


def _report(run: Run, runtime: AotRuntime, calls: Sequence[Calls]) -> Report:
    """The report on a compiled step.

    Args:
      run: the run that the step is of.
      runtime: the slice that it was compiled for.
      calls: one entry for each compiled program; a single entry if the step is not split.
    """
    config, tpu_slice, mesh = run.config, run.config.tpu_slice, run.mesh
    training, is_split = config.training, config.tpu_config.use_graph_split
    missing = []
    if not all(call.program.dump.hlo for call in calls):
        missing.append("collectives, kernels and buffers: this libtpu writes no optimized program")
    modules = {} if missing else {call: parse_hlo(call.program.dump.hlo) for call in calls}
    kernels: collections.Counter[str] = collections.Counter()
    for call, module in modules.items():
        kernels.update({name: count * call.number for name, count in count_kernels(module).items()})
    flops = sum(call.number * program_flops(module, undeclared_flops(config)) for call, module in modules.items())
    traffic = [call.number * call.program.traffic_bytes for call in calls if call.program.traffic_bytes is not None]
    packages = (*_PACKAGES, "torch_tpu") if config.aot.lowering == "torch_tpu" else _PACKAGES
    tokens = training.batch_size * training.sequence_length
    model_flops = config.model.flops_per_token(training.sequence_length) * tokens
    memory = _memory(run, runtime, calls, modules)
    return Report(
        name=config.name,
        hardware=str(tpu_slice),
        mesh=str(mesh),
        num_devices=tpu_slice.num_devices,
        num_chips=tpu_slice.num_chips,
        batch_size=training.batch_size,
        sequence_length=training.sequence_length,
        compiler_options=runtime.compiler_options,
        memory=memory if memory.fits else dataclasses.replace(memory, advice=advice(config, memory)),
        collectives=group_collectives(
            collective
            for call, module in modules.items()
            for collective in find_collectives(module, mesh)
            for _ in range(call.number)
        ),
        compute=Compute(
            model_flops=model_flops,
            compiled_flops=flops * mesh.num_devices if modules else None,
            hbm_bytes=sum(traffic) if len(traffic) == len(calls) else None,
            kernels=dict(kernels.most_common()),
            stablehlo_bytes=sum(program.dump.stablehlo_bytes for program in _distinct(calls)),
        ),
        modelled=_modelled(run, calls, model_flops) if all(call.program.dump.code for call in calls) else None,
        seconds=dict(run.seconds),
        versions={
            **{name: importlib.metadata.version(name) for name in packages},
            "TPU compiler": runtime.compiler_version,
        },
        missing=tuple(missing),
        programs=tuple(map(_row, calls)) if is_split else (),
    )


def _memory(run: Run, runtime: AotRuntime, calls: Sequence[Calls], modules: Mapping[Calls, HloModule]) -> Memory:
    """The memory during the call that needs most."""
    capacity = run.config.tpu_slice.hardware.usable_hbm_bytes
    most = max(calls, key=lambda call: call.peak_bytes)
    fits = all(call.program.fits for call in calls) and most.peak_bytes <= capacity
    memory = memory_of(
        temporaries(most.program.dump, modules[most]) if modules else [],
        fits=fits,
        needed=most.peak_bytes,
        capacity=capacity,
        arguments=_arguments(run, runtime),
        program=sum(program.code_bytes for program in _distinct(calls)) if fits else None,
        host=max(call.held.on_host + call.program.host_bytes for call in calls) if fits else None,
    )
    if not most.held.between:
        return memory
    return dataclasses.replace(memory, at_peak={BETWEEN: most.held.between, **memory.at_peak})


def _modelled(run: Run, calls: Sequence[Calls], model_flops: float) -> ModelledTime:
    """The modelled time of one step.

    Args:
      run: the run that the step is of.
      calls: one entry for each compiled program.
      model_flops: of one step, on all devices.
    """
    config, tpu_slice, mesh, training = run.config, run.config.tpu_slice, run.mesh, run.config.training
    tokens = training.batch_size * training.sequence_length
    links, axis_sizes = (
        Links(tpu_slice.hardware, tpu_slice.shape),
        dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)),
    )
    times = []
    for call in calls:
        module = parse_hlo(call.program.dump.code)
        time = step_time(module, find_collectives(module, mesh), links, axis_sizes, undeclared_flops(config))
        times.append((call.number, time))
    parts = {
        name: sum(number * getattr(time, name) for number, time in times)
        for name in ("matmuls", "other", "kernels", "exposed_collectives")
    }
    total = sum(parts.values())
    return ModelledTime(
        step_seconds=total,
        **parts,
        tokens_per_second_per_chip=tokens / total / tpu_slice.num_chips,
        mfu=model_flops / total / (tpu_slice.num_chips * tpu_slice.hardware.peak_bf16_flops),
        undeclared_kernels=tuple(dict.fromkeys(name for _, time in times for name in time.undeclared)),
    )


def _row(call: Calls) -> ProgramOfStep:
    program = call.program
    return ProgramOfStep(
        call.name, call.number, call.peak_bytes, call.held.beside, program.compile_seconds, program.was_kept
    )


def _distinct(calls: Sequence[Calls]) -> list[CompiledProgram]:
    return list({id(call.program): call.program for call in calls}.values())


def undeclared_flops(config: Config) -> dict[str, float]:
    """FLOPs of one call on one device of each kernel that declares no cost, by how the kernels' names begin.

    Args:
      config: resolved for the devices.
    """
    training, model = config.training, config.model
    of_step = model.attention_flops_per_token(training.sequence_length)
    of_step *= training.batch_size * training.sequence_length
    # Forward and backward, which takes twice as many, have six matrix products.
    matmul = of_step / 6 / model.num_layers / training.microbatches / config.parallelism.num_devices
    sections = (getattr(config, field.name) for field in dataclasses.fields(config))
    found: dict[str, float] = {}
    for section in sections:
        if isinstance(section, KernelSection):
            found |= section.undeclared_flops(matmul)
    return found


def _arguments(run: Run, runtime: AotRuntime) -> dict[str, int]:
    state = runtime.state_layouts
    parameters = [layout for name, layout in state.items() if name.startswith(PARAMS)]
    others = [layout for name, layout in state.items() if not name.startswith(PARAMS)]
    tensors = run.config.model.batch_tensors(run.config.training.sequence_length)
    batch = batch_layouts(tensors, batch_shapes(run.config), run.mesh)
    return {
        "parameters": argument_bytes(parameters, run.mesh),
        "optimizer_state": argument_bytes(others, run.mesh),
        "batch": argument_bytes(batch.values(), run.mesh),
    }


def _earlier(path: str) -> Report:
    try:
        return from_json(pathlib.Path(os.path.expanduser(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("aot.compare", f"{path!r} is no report: {error}", "give a file of --aot.report") from None
