"""The xla executor: a StepGraph lowered to JAX and compiled as one SPMD program over a mesh of devices."""

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from titan.graph.ir.step_graph import StepGraph
from titan.graph.lowering.dtypes import array_dtype
from titan.graph.lowering.lower import lower
from titan.kernels.target import Target
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec

_log = logging.getLogger(__name__)

Arrays = dict[str, jax.Array]


def jax_mesh(spec: MeshSpec, devices: Sequence[jax.Device]) -> Mesh:
    """The JAX mesh with the axes of `spec`. A mesh without axes is one device.

    Raises:
      ValueError: there are fewer devices than the mesh has.
    """
    if len(devices) < spec.num_devices:
        raise ValueError(f"the mesh {spec} needs {spec.num_devices} devices, there are {len(devices)}")
    grid = np.array(devices[: spec.num_devices], dtype=object).reshape(spec.axis_sizes)
    return Mesh(grid, spec.axis_names)


def sharding(layout: TensorLayout, spec: MeshSpec, mesh: Mesh) -> NamedSharding:
    """Where a tensor of this layout lies on the mesh."""
    return NamedSharding(mesh, partition_spec(layout, spec))


def partition_spec(layout: TensorLayout, spec: MeshSpec) -> PartitionSpec:
    """The layout in JAX's terms: for each dim the mesh axes that shard it."""
    return PartitionSpec(*(axes if len(axes) > 1 else (axes[0] if axes else None) for axes in layout.axes_by_dim(spec)))


def abstract_arrays(layouts: Mapping[str, TensorLayout], spec: MeshSpec, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of each tensor, with no storage."""
    return {
        name: jax.ShapeDtypeStruct(layout.shape, array_dtype(layout.dtype), sharding=sharding(layout, spec, mesh))
        for name, layout in layouts.items()
    }


def place_batch(graph: StepGraph, mesh: Mesh, batch: Mapping[str, np.ndarray]) -> Arrays:
    """Starts the transfer of this process's rows of a step's global batch to the devices."""
    return {
        name: jax.make_array_from_process_local_data(sharding(layout, graph.mesh, mesh), batch[name], layout.shape)
        for name, layout in graph.batch.items()
    }


@dataclasses.dataclass(frozen=True)
class XlaExecutable:
    """A compiled step.

    Attributes:
      graph: what was compiled.
      mesh: the devices that it runs on.
      compiled: JAX's compiled program, for its memory and cost analysis; None where a program that was compiled earlier
        is known to be this step's, and its devices are not there to load it.
      lower_seconds: time to lower the graph to StableHLO.
      compile_seconds: time in the XLA compiler, or to load its result from the disk cache.
    """

    graph: StepGraph
    mesh: Mesh
    compiled: Any
    lower_seconds: float
    compile_seconds: float

    def __call__(self, state: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> tuple[Arrays, Arrays]:
        """Runs one step and returns at once with arrays still being computed.

        Args:
          state: sharded as `graph.state` says; if the step updates it, its buffers are donated and
            must not be used again.
          batch: sharded as `graph.batch` says (see `place`).

        Returns:
          The new state (empty for a step that only reads it) and the metrics.
        """
        graph = self.graph
        outputs = self.compiled(*(state[name] for name in graph.state), *(batch[name] for name in graph.batch))
        num_state = len(graph.state) if graph.updates_state else 0
        return dict(zip(list(graph.state)[:num_state], outputs[:num_state], strict=True)), dict(
            zip(graph.metrics, outputs[num_state:], strict=True)
        )

    def place(self, batch: Mapping[str, np.ndarray]) -> Arrays:
        """Starts the transfer of a batch to the devices. Every process passes its own rows of the global batch."""
        return place_batch(self.graph, self.mesh, batch)


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """A step as StableHLO, to be compiled.

    Attributes:
      graph: what was lowered.
      mesh: the devices that it is for.
      lowered: JAX's lowered program.
      lower_seconds: time to lower the graph to StableHLO.
    """

    graph: StepGraph
    mesh: Mesh
    lowered: Any
    lower_seconds: float

    def compile(self) -> XlaExecutable:
        """Runs the XLA compiler, whose errors pass through."""
        start = time.perf_counter()
        compiled = self.lowered.compile()
        compile_seconds = time.perf_counter() - start
        _log.debug("lowered in %.2f s, compiled in %.2f s", self.lower_seconds, compile_seconds)
        return XlaExecutable(self.graph, self.mesh, compiled, self.lower_seconds, compile_seconds)


def lower_xla(
    graph: StepGraph, devices: Sequence[jax.Device], *, compiler_options: Mapping[str, str] | None = None
) -> LoweredStep:
    """Lowers a step for `devices`.

    Args:
      graph: the step after its passes.
      devices: in mesh order, outermost axis first; no array is placed on them by this call.
      compiler_options: XLA options for this program.

    Raises:
      LoweringError: an op has no lowering, or a lowering disagrees with the graph.
      ValueError: there are too few devices.
    """
    mesh = jax_mesh(graph.mesh, devices)
    function = lower(graph.module, target=Target(devices[0].platform, devices[0].device_kind))
    inputs = {**graph.state, **graph.batch}
    outputs = [*(graph.state.values() if graph.updates_state else ()), *graph.metrics.values()]
    if graph.mesh.axis_names:
        function = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=tuple(partition_spec(layout, graph.mesh) for layout in inputs.values()),
            out_specs=tuple(partition_spec(layout, graph.mesh) for layout in outputs),
            # Replication is the SPMD check's business; JAX cannot infer it through a hand-written reduction.
            check_vma=False,
        )
    jitted = jax.jit(
        function,
        out_shardings=tuple(sharding(layout, graph.mesh, mesh) for layout in outputs),
        donate_argnums=tuple(range(len(graph.state))) if graph.updates_state else (),
        compiler_options=dict(compiler_options or {}),
    )
    start = time.perf_counter()
    lowered = jitted.lower(*abstract_arrays(inputs, graph.mesh, mesh).values())
    return LoweredStep(graph, mesh, lowered, time.perf_counter() - start)
