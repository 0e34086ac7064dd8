"""A report as one self-contained HTML page: memory by kind, memory over the schedule, collectives, and the numbers."""

import html
from collections.abc import Iterable, Mapping, Sequence

from titan.graph.aot.report import Report
from titan.graph.aot.text import size_text, to_text

_COLOURS = {
    "parameters": "#3b6ea8",
    "optimizer state": "#7aa6d6",
    "batch": "#5f6b7a",
    "saved activations": "#d9822b",
    "gathered parameters": "#c9b037",
    "gradients": "#5a9e5a",
    "temporaries": "#b05a7a",
    "between programs": "#8a6fb0",
    "the rest": "#cfcfcf",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2330; background: #fff; max-width: 64rem; margin: 2rem auto; }
body { padding: 0 1rem; } h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { font-weight: 600; } .bad { color: #a3262a; } .good { color: #22703a; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem .9rem .15rem 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; } th { border-bottom: 1px solid #bbb; }
.legend span { display: inline-block; margin-right: 1rem; } .legend i { display: inline-block; width: .8rem; }
.legend i { height: .8rem; margin-right: .3rem; vertical-align: -1px; } svg { width: 100%; height: auto; }
pre { background: #f5f6f8; padding: 1rem; overflow-x: auto; font-size: 12px; }
text { font: 11px system-ui, sans-serif; }
"""
_WIDTH = 960


def to_html(report: Report) -> str:
    """The page; it loads nothing from elsewhere and runs no script."""
    memory = report.memory
    parts = {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer_state,
        "batch": memory.batch,
        **memory.at_peak,
    }
    parts["the rest"] = max(memory.needed - sum(parts.values()), 0)
    verdict = "fits" if memory.fits else "does not fit"
    title = html.escape(f"{report.name} on {report.hardware}")
    sections = [
        f"<h1>{title}</h1>",
        f"<p>{report.num_devices} devices on {report.num_chips} chips, mesh {html.escape(report.mesh)}; "
        f"{report.batch_size} sequences of {report.sequence_length} tokens a step</p>",
        *_options(report.compiler_options),
        f'<p class="verdict {"good" if memory.fits else "bad"}">A device needs {size_text(memory.needed)} of '
        f"{size_text(memory.capacity)}: {verdict}.</p>",
        "<h2>Memory of a device at the peak</h2>",
        _legend(parts),
        _bar(parts, memory.capacity),
        _rows(("kind", "bytes"), [(name, size_text(size)) for name, size in parts.items() if size]),
        *(["<ul>", *(f"<li>{html.escape(line)}</li>" for line in memory.advice), "</ul>"] if memory.advice else []),
        "<h2>Memory over the schedule</h2>",
        "<p>What is there throughout (parameters, optimizer state, batch) at the bottom, temporaries on it.</p>",
        _legend(memory.timeline),
        _area(memory.timeline, memory.parameters + memory.optimizer_state + memory.batch, memory.capacity),
        "<h2>Largest buffers at the peak</h2>",
        _rows(
            ("bytes", "number", "shape", "kind", "made by"),
            [(size_text(one.bytes), f"{one.count}", one.shape, one.kind, one.made_by) for one in memory.largest],
        ),
        "<h2>Collectives by mesh axis</h2>",
        _collectives(report),
        *_time(report),
        *_programs(report),
        "<h2>The whole report</h2>",
        f"<pre>{html.escape(to_text(report))}</pre>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"</head><body>\n{chr(10).join(sections)}\n</body></html>\n"
    )


def _options(options: Mapping[str, str]) -> list[str]:
    if not options:
        return []
    shown = "<br>".join(f"<code>{html.escape(name)}={html.escape(value)}</code>" for name, value in options.items())
    return [f"<p>Compiler options: {shown}</p>"]


def _legend(parts: Iterable[str]) -> str:
    marks = "".join(f'<span><i style="background:{_COLOURS[name]}"></i>{html.escape(name)}</span>' for name in parts)
    return f'<p class="legend">{marks}</p>'


def _bar(parts: Mapping[str, int], capacity: int) -> str:
    """One stacked bar, with a line where the memory ends."""
    scale = (_WIDTH - 20) / _extent(sum(parts.values()), capacity)
    shapes, x = [], 0.0
    for name, size in parts.items():
        shapes.append(
            f'<rect x="{x:.1f}" y="18" width="{size * scale:.1f}" height="44" fill="{_COLOURS[name]}">'
            f"<title>{html.escape(name)}: {size_text(size)}</title></rect>"
        )
        x += size * scale
    end = min(capacity * scale, _WIDTH)
    if end < _WIDTH:
        shapes.append(f'<line x1="{end:.1f}" x2="{end:.1f}" y1="10" y2="70" stroke="#a3262a" stroke-width="2"/>')
    shapes.append(
        f'<text x="{end:.1f}" y="8" text-anchor="end" fill="#a3262a">{_capacity(capacity, end < _WIDTH)}</text>'
    )
    return _svg(80, "memory by kind", shapes)


def _extent(size: int, capacity: int) -> int:
    """Bytes that a picture's length stands for: the capacity, or of a small program twice what it needs."""
    return max(size, capacity) if 8 * size >= capacity else 2 * size


def _capacity(capacity: int, is_shown: bool) -> str:
    return size_text(capacity) if is_shown else f"{size_text(capacity)} are there, far beyond this picture"


def _area(timeline: Mapping[str, Sequence[int]], always: int, capacity: int) -> str:
    """Stacked areas over the steps of the schedule."""
    num_points = max(map(len, timeline.values()), default=0)
    if not num_points:
        return "<p>not known</p>"
    height, top = 240, 20
    totals = [always + sum(column) for column in zip(*timeline.values(), strict=True)]
    extent = _extent(max(totals), capacity)
    scale = (height - top) / extent
    step = (_WIDTH - 20) / max(num_points - 1, 1)

    def y(size: float) -> float:
        return height - size * scale

    base = [0] * num_points
    shapes = []
    for name, series in (("parameters", [always] * num_points), *timeline.items()):
        ceiling = [low + size for low, size in zip(base, series, strict=True)]
        points = [f"{index * step:.1f},{y(size):.1f}" for index, size in enumerate(ceiling)]
        points += [f"{index * step:.1f},{y(base[index]):.1f}" for index in reversed(range(num_points))]
        shapes.append(f'<polygon points="{" ".join(points)}" fill="{_COLOURS[name]}"/>')
        base = ceiling
    line = y(min(capacity, extent))
    if capacity <= extent:
        shapes.append(f'<line x1="0" x2="{_WIDTH}" y1="{line:.1f}" y2="{line:.1f}" stroke="#a3262a" stroke-width="2"/>')
    shapes.append(f'<text x="4" y="{line - 5:.1f}" fill="#a3262a">{_capacity(capacity, capacity <= extent)}</text>')
    return _svg(height, "memory over the schedule", shapes)


def _collectives(report: Report) -> str:
    if not report.collectives:
        return "<p>none</p>"
    longest = max(row.bytes for row in report.collectives) or 1
    shapes = []
    for index, row in enumerate(report.collectives):
        y = 26 * index
        width = max(row.bytes / longest * (_WIDTH - 560), 1)
        colour = "#7aa6d6" if row.asynchronous else "#d9822b"
        label = f"{row.axes}: {row.count} x {row.kind}{', in a loop' * row.in_loop}"
        form = "asynchronous" if row.asynchronous else "exposed"
        shapes.append(f'<text x="0" y="{y + 15}">{html.escape(label)}</text>')
        shapes.append(f'<rect x="360" y="{y + 2}" width="{width:.1f}" height="18" fill="{colour}"/>')
        shapes.append(f'<text x="{368 + width:.1f}" y="{y + 15}">{size_text(row.bytes)} {form}</text>')
    return _svg(26 * len(report.collectives), "collectives by axis", shapes)


def _time(report: Report) -> list[str]:
    time = report.modelled
    if time is None:
        return []
    names = ("matmuls", "kernels", "exposed_collectives", "other")
    return [
        "<h2>Modelled time</h2>",
        f"<p>{time.step_seconds:.4f} s a step, {time.tokens_per_second_per_chip:,.0f} tokens/s/chip, MFU "
        f"{time.mfu:.1%}. A model from the compiler's own estimates: no measurement.</p>",
        _rows(("part", "seconds"), [(name.replace("_", " "), f"{getattr(time, name):.4f}") for name in names]),
    ]


def _programs(report: Report) -> list[str]:
    if not report.programs:
        return []
    rows = [
        (one.name, str(one.calls), size_text(one.peak), f"{one.compile_seconds:.1f}" + " (kept)" * one.was_kept)
        for one in report.programs
    ]
    return [
        "<h2>Programs of the split step</h2>",
        "<p>All numbers above are sums over all calls. The memory is that of the call that needs most, its temporaries "
        "over its own schedule.</p>",
        _rows(("program", "number", "bytes", "seconds"), rows),
    ]


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    numbers = ("bytes", "number", "seconds")

    def cell(tag: str, name: str, value: str) -> str:
        attribute = ' class="number"' if name in numbers else ""
        return f"<{tag}{attribute}>{html.escape(value)}</{tag}>"

    lines = ["".join(cell("th", name, name) for name in head)]
    lines += ["".join(cell("td", name, value) for name, value in zip(head, row, strict=True)) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _svg(height: int, label: str, shapes: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'
