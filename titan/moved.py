"""Names that modules had before version 0.2, kept for one version.

Importing one gives what it named, and a warning with the new name.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

_MODULES = {
    "titan.core.data.atomic": "titan.core.files",
    "titan.core.data.images.packed_pictures": "titan.models.flux.rows",
    "titan.core.data.images.picture_part": "titan.core.data.images.image_part",
    "titan.core.data.images.picture_store": "titan.core.data.images.image_store",
    "titan.graph.aot.held": "titan.graph.aot.resident_bytes",
    "titan.graph.attribution": "titan.graph.capture.attribution",
    "titan.graph.barrier": "titan.graph.ir.barrier",
    "titan.graph.canonical": "titan.graph.ir.digest",
    "titan.graph.dialect": "titan.graph.ir.dialect",
    "titan.graph.executors.piece": "titan.graph.split.programs",
    "titan.graph.executors.split": "titan.graph.split.executable",
    "titan.graph.lowering.activation": "titan.graph.lowering.aten.activation",
    "titan.graph.lowering.attention": "titan.graph.lowering.aten.attention",
    "titan.graph.lowering.collectives": "titan.graph.lowering.dialect.collectives",
    "titan.graph.lowering.control_flow": "titan.graph.lowering.dialect.control_flow",
    "titan.graph.lowering.creation": "titan.graph.lowering.aten.creation",
    "titan.graph.lowering.foreach": "titan.graph.lowering.aten.foreach",
    "titan.graph.lowering.handwritten_samples": "titan.graph.lowering.opinfo.handwritten_samples",
    "titan.graph.lowering.indexing": "titan.graph.lowering.aten.indexing",
    "titan.graph.lowering.kernels": "titan.graph.lowering.dialect.kernels",
    "titan.graph.lowering.loss": "titan.graph.lowering.aten.loss",
    "titan.graph.lowering.lowering_check": "titan.graph.lowering.opinfo.lowering_check",
    "titan.graph.lowering.matmul": "titan.graph.lowering.aten.matmul",
    "titan.graph.lowering.normalization": "titan.graph.lowering.aten.normalization",
    "titan.graph.lowering.offload": "titan.graph.lowering.dialect.offload",
    "titan.graph.lowering.opinfo_samples": "titan.graph.lowering.opinfo.opinfo_samples",
    "titan.graph.lowering.pointwise": "titan.graph.lowering.aten.pointwise",
    "titan.graph.lowering.reduction": "titan.graph.lowering.aten.reduction",
    "titan.graph.lowering.shape": "titan.graph.lowering.aten.shape",
    "titan.graph.region": "titan.graph.ir.region",
    "titan.graph.reversed_scans": "titan.graph.ir.reversed_scans",
    "titan.graph.scan_layers": "titan.graph.capture.scan_layers",
    "titan.graph.spmd_check": "titan.graph.capture.spmd_check",
    "titan.graph.step_graph": "titan.graph.ir.step_graph",
    "titan.graph.transfers": "titan.graph.ir.transfers",
    "titan.models.flux.picture_times": "titan.models.layers.image_times",
    "titan.parallel.link_load": "titan.parallel.tpu_topology.link_load",
    "titan.parallel.module_borders": "titan.parallel.module_boundaries",
    "titan.parallel.placement": "titan.parallel.tpu_topology.placement",
    "titan.parallel.ring": "titan.parallel.tpu_topology.ring",
    "titan.parallel.topology": "titan.parallel.tpu_topology.topology",
    "titan.parallel.topology_svg": "titan.parallel.tpu_topology.topology_svg",
    "titan.parallel.topology_text": "titan.parallel.tpu_topology.topology_text",
    "titan.parallel.torus": "titan.parallel.tpu_topology.torus",
    "titan.train.adamw": "titan.train.optimizers.adamw",
    "titan.train.aot_advice": "titan.train.aot.advice",
    "titan.train.compile_config": "titan.train.config.compile",
    "titan.train.compiled_step": "titan.train.runtime.compiled_step",
    "titan.train.compiler_options": "titan.train.runtime.compiler_options",
    "titan.train.data": "titan.train.inputs.data",
    "titan.train.device_order": "titan.train.sharding.device_order",
    "titan.train.distributed": "titan.train.runtime.processes",
    "titan.train.distributed_config": "titan.train.config.processes",
    "titan.train.expert_balance": "titan.train.step.expert_balance",
    "titan.train.expert_balance_config": "titan.train.config.expert_balance",
    "titan.train.expert_parallel": "titan.train.sharding.expert_parallel",
    "titan.train.folder_lock": "titan.train.loop.folder_lock",
    "titan.train.hf_weights": "titan.train.inputs.hf_weights",
    "titan.train.launch": "titan.train.runtime.launch",
    "titan.train.lr_schedule": "titan.train.loop.lr_schedule",
    "titan.train.mesh_axes": "titan.train.sharding.mesh_axes",
    "titan.train.model_split": "titan.train.sharding.model_plan",
    "titan.train.parallelism_checks": "titan.train.config.checks",
    "titan.train.parallelism_config": "titan.train.config.parallelism",
    "titan.train.pictures.euler": "titan.train.images.euler",
    "titan.train.pictures.open_pictures": "titan.train.images.open_images",
    "titan.train.pictures.release_encoders": "titan.train.images.release_encoders",
    "titan.train.pictures.sampler": "titan.train.images.sampler",
    "titan.train.pictures.sampling_config": "titan.train.config.sampling",
    "titan.train.pictures.trial_encoders": "titan.train.images.trial_encoders",
    "titan.train.runtime_aot": "titan.train.runtime.aot",
    "titan.train.runtime_torch": "titan.train.runtime.torch",
    "titan.train.runtime_xla": "titan.train.runtime.xla",
    "titan.train.saved_step": "titan.train.runtime.saved_step",
    "titan.train.stacks": "titan.train.step.stored_form",
    "titan.train.state": "titan.train.step.state",
    "titan.train.stop": "titan.train.loop.stop",
    "titan.train.summary": "titan.train.loop.summary",
    "titan.train.swaps.config": "titan.train.config.kernels",
    "titan.train.swaps.split_picture_times": "titan.train.swaps.split_image_times",
    "titan.train.token_order": "titan.train.sharding.token_order",
    "titan.train.variant": "titan.train.config.variant",
}

# Modules that are packages now: package -> the module of the names that it had as a module, and these names.
_NAMES = {
    "titan.graph.capture": ("titan.graph.capture.trace", ("StepFunction", "Tensors", "capture")),
    "titan.graph.split": ("titan.graph.split.pieces", ("Loop", "SplitStep", "Straight", "aten", "split_step")),
    "titan.train.aot": ("titan.train.aot.command", ("batch_shapes", "compile_ahead_of_time", "main")),
    "titan.train.config": (
        "titan.train.config.run",
        ("Config", "LrScheduleConfig", "OptimizerConfig", "TrainingConfig"),
    ),
    "titan.train.loop": ("titan.train.loop.loop", ("Outcome", "Progress", "Sampler", "restore", "train")),
    "titan.train.runtime": ("titan.train.runtime.interface", ("CompileTarget", "Runtime", "State")),
    "titan.train.step": ("titan.train.step.builder", ("StepBuilder",)),
}


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes away with version 0.3", DeprecationWarning, stacklevel=4)


class _OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module under the name that it had, after all other finders have failed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in _MODULES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        _warn(spec.name, _MODULES[spec.name])
        return importlib.import_module(_MODULES[spec.name])

    def exec_module(self, module: types.ModuleType) -> None:
        # The import system has put the spec of the old name on it.
        module.__spec__ = importlib.machinery.PathFinder.find_spec(module.__name__, _search_path(module.__name__))


def _search_path(name: str) -> Any:
    return importlib.import_module(name.rpartition(".")[0]).__path__


def old_names(package: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package that was a module: it finds the names that the module had.

    Args:
        package: its dotted name.
    """
    module, names = _NAMES[package]

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        _warn(f"{package}.{name}", f"{module}.{name}")
        return getattr(importlib.import_module(module), name)

    return attribute


def install() -> None:
    """Adds the finder of old names behind those of the import system, once."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())
