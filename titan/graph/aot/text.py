"""A report as text for the terminal."""

from collections.abc import Iterable, Sequence

from titan.graph.aot.report import Memory, ModelledTime, Report


def to_text(report: Report) -> str:
    """The report, section by section, each line at most about 120 characters."""
    tokens = report.batch_size * report.sequence_length
    lines = [
        f"{report.name} on {report.hardware}: {report.num_devices} devices, {report.num_chips} chips, mesh "
        f"{report.mesh}; {report.batch_size} x {report.sequence_length} = {tokens:,} tokens a step",
        *([f"options    {_options(report)}"] if report.compiler_options else []),
        "",
        *_programs(report),
        *_memory(report.memory),
        "",
        *_collectives(report),
        "",
        *_compute(report),
        "",
        *_modelled(report.modelled),
        "seconds    " + ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.seconds.items()),
        "versions   " + ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        *(f"missing    {line}" for line in report.missing),
    ]
    return "\n".join(lines) + "\n"


def _options(report: Report) -> str:
    return " ".join(f"{name}={value}" for name, value in report.compiler_options.items())


def _programs(report: Report) -> list[str]:
    if not report.programs:
        return []
    rows = [("program", "calls", "peak", "of it held for others", "compiled in")]
    for one in report.programs:
        kept = " by an earlier run" if one.was_kept else ""
        rows.append(
            (one.name, str(one.calls), size_text(one.peak), size_text(one.held), f"{one.compile_seconds:.1f} s{kept}")
        )
    calls = sum(one.calls for one in report.programs)
    return [
        f"programs   a split step: {len(report.programs)} programs, {calls} calls; what follows are sums over the "
        "calls, the memory is that of the call that needs most",
        *_table(rows),
        "",
    ]


def _memory(memory: Memory) -> list[str]:
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    share = memory.needed / memory.capacity
    parts = {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer_state,
        "batch": memory.batch,
        **memory.at_peak,
    }
    parts["padding, fragmentation and reserve"] = max(memory.needed - sum(parts.values()), 0)
    if memory.host:
        parts["(host memory)"] = memory.host
    lines = [
        f"memory     {verdict}: {'peak' if memory.fits else 'needs'} {size_text(memory.needed)} of "
        f"{size_text(memory.capacity)} a device ({share:.0%})"
    ]
    lines += _table([(name, size_text(num_bytes)) for name, num_bytes in parts.items()])
    if memory.largest:
        lines.append("  largest buffers at the peak, besides the arguments:")
        lines += _table(
            (size_text(row.bytes), f"{row.count} x" if row.count > 1 else "", row.shape, row.kind, row.made_by)
            for row in memory.largest
        )
    lines += [f"  to change: {advice}" for advice in memory.advice]
    return lines


def _collectives(report: Report) -> list[str]:
    if not report.collectives:
        return ["collectives  none"]
    rows = [("axis", "kind", "count", "bytes", "")]
    for row in report.collectives:
        form = "asynchronous" if row.asynchronous else "exposed"
        rows.append((row.axes, row.kind, f"{row.count}", size_text(row.bytes), form + (", in a loop" * row.in_loop)))
    return ["collectives  of one device, in one step", *_table(rows)]


def _compute(report: Report) -> list[str]:
    compute = report.compute
    rows = [("model FLOPs", f"{compute.model_flops:.3e}")]
    if compute.compiled_flops is not None:
        rows.append(
            ("compiled FLOPs", f"{compute.compiled_flops:.3e} ({compute.compiled_flops / compute.model_flops:.2f}x)")
        )
    if compute.hbm_bytes is not None:
        rows.append(("HBM traffic of a device", size_text(int(compute.hbm_bytes))))
    kernels = ", ".join(f"{name} x {count}" for name, count in compute.kernels.items())
    if report.memory.program is not None:
        rows.append(
            ("program", f"{size_text(report.memory.program)}, of {size_text(compute.stablehlo_bytes)} of StableHLO")
        )
    rows.append(("Mosaic kernels", kernels or "none"))
    return ["compute    of all devices, in one step", *_table(rows)]


def _modelled(time: ModelledTime | None) -> list[str]:
    if time is None:
        return []
    rows = [(name, f"{getattr(time, name):.4f} s") for name in ("matmuls", "other", "kernels", "exposed_collectives")]
    lines = [
        f"modelled   {time.step_seconds:.4f} s a step, {time.tokens_per_second_per_chip:,.0f} tokens/s/chip, MFU "
        f"{time.mfu:.1%}: a model from the compiler's estimates, no measurement",
        *_table([(name.replace("_", " "), seconds) for name, seconds in rows]),
    ]
    if time.undeclared_kernels:
        lines.append(f"    kernels that declare no cost: {', '.join(time.undeclared_kernels)}")
    return [*lines, ""]


def size_text(num_bytes: int) -> str:
    """Such as "3.20 GiB", or "64.00 MiB" for what is small."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.2f} MiB"


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [
        "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
