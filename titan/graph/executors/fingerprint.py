"""What a compiled step depends on, as named strings: two programs whose fingerprints are equal are the same program."""

import base64
import hashlib
import importlib.metadata
import operator
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import torch
import torch.fx

from titan.graph.executors.xla import LoweredStep
from titan.graph.ir.step_graph import StepGraph
from titan.parallel.layout import TensorLayout

_PACKAGES = ("jax", "jaxlib", "torch")
# Variables from which the compilers take options, and those of the options that do not change the program.
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_HARMLESS = ("--xla_force_host_platform_device_count", "--xla_dump")
_KERNEL_BODY = re.compile(r"(body\\22: \\22)([A-Za-z0-9+/=]+)(\\22)")


def fingerprint(lowered: LoweredStep, compiler_options: Mapping[str, str]) -> dict[str, str]:
    """Everything that decides what the compiler makes of a step, by name; long things by their SHA-256.

    Paths and line numbers of source code do not enter it; the lowering and the kernels do by what they make: `program`.

    Args:
      lowered: the step for given devices, which need not be there.
      compiler_options: given to the compiler beyond its defaults.
    """
    graph = lowered.graph
    return {
        **compiler_fingerprint(list(lowered.mesh.devices.flat), compiler_options),
        "mesh": str(graph.mesh),
        **{f"batch.{name}": _layout(layout) for name, layout in graph.batch.items()},
        "state": _sha256(f"{name} {_layout(layout)}" for name, layout in graph.state.items()),
        "graph": graph_digest(graph),
        "program": program_digest(lowered.lowered.as_text()),
    }


def compiler_fingerprint(devices: Sequence[jax.Device], compiler_options: Mapping[str, str]) -> dict[str, str]:
    """The part of a fingerprint that all programs compiled for these devices with these options have in common."""
    return {
        "hardware": _hardware(devices),
        **{f"compiler_options.{name}": value for name, value in compiler_options.items()},
        **{f"versions.{name}": importlib.metadata.version(name) for name in _PACKAGES},
        "versions.compiler": devices[0].client.platform_version.splitlines()[-1],
        **{f"environment.{name}": flags for name in _ENVIRONMENT if (flags := _flags(name))},
        "device_order": _sha256(f"{device.id} {getattr(device, 'coords', '')}" for device in devices),
    }


def graph_digest(graph: StepGraph) -> str:
    """SHA-256 of what the graph computes: its ops and constants, without the source lines that they come from."""
    # What follows "  # " in a line is where in the source code the op comes from.
    return _sha256([*(line.partition("  # ")[0] for line in graph.text().splitlines()), *_attributes(graph.module)])


def program_digest(text: str) -> str:
    """SHA-256 of a StableHLO text. Of Mosaic kernels in it what they compute counts, not where their code lies."""
    return _sha256([_KERNEL_BODY.sub(lambda match: match[1] + _kernel_digest(match[2]) + match[3], text)])


def _attributes(module: torch.fx.GraphModule) -> Iterator[str]:
    """The constants that a graph refers to by name alone, those in the bodies of its loops among them."""
    for node in module.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(node.target)(module)
        if isinstance(value, torch.fx.GraphModule):
            yield from _attributes(value)
        elif isinstance(value, torch.Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            yield f"{node.target} {value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"


def _kernel_digest(body: str) -> str:
    """Of a kernel in Mosaic's bytecode, in which there are paths and line numbers of its source code."""
    from jax.experimental.mosaic.dialects import tpu
    from jax.extend.mlir import ir

    with ir.Context() as context:
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(base64.b64decode(body))
        return _sha256([module.operation.get_asm(enable_debug_info=False)])


def _hardware(devices: Sequence[jax.Device]) -> str:
    first = devices[0]
    text = f"{len(devices)} x {first.device_kind}"
    if first.platform == "cpu":
        return f"{text} ({_host_cpu()})"  # XLA:CPU compiles for the instructions of the machine that it runs on
    if first.platform == "tpu":
        extents = (max(values) - min(values) + 1 for values in zip(*(device.coords for device in devices), strict=True))
        num_slices = len({getattr(device, "slice_index", 0) for device in devices})
        slices = f"{num_slices} slices of " if num_slices > 1 else ""
        text += f" ({slices}{'x'.join(map(str, extents))} chips)"
    return text


def _host_cpu() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(reversed([tuple(map(str.strip, line.split(":", 1))) for line in lines if ":" in line]))
    features = fields.get("flags") or fields.get("Features", "")
    return f"{fields.get('model name', platform.machine())}, features {_sha256([features])[:8]}"


def _flags(variable: str) -> str:
    return " ".join(flag for flag in os.environ.get(variable, "").split() if not flag.startswith(_HARMLESS))


def _layout(layout: TensorLayout) -> str:
    dtype = str(layout.dtype).removeprefix("torch.")
    return f"{dtype}{list(layout.shape)} {'/'.join(map(str, layout.placements))}".strip()


def _sha256(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\n")
    return digest.hexdigest()
