"""The devices of the xla executor: starting JAX, placing the initial state, reading values back."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from titan.core.init import Initializer, sample
from titan.graph.executors.xla import XlaExecutable, abstract_arrays, compile_xla, jax_mesh
from titan.graph.step_graph import StepGraph
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec
from titan.train.config import Config
from titan.train.state import PARAMS


class XlaRuntime:
    """JAX's devices: accelerators where there are any, else virtual CPU devices.

    Attributes:
      num_devices: devices of all processes together.
      process_index, process_count: this process among those of the run.
      device_kind: JAX's name of the devices.
      captures: the executor takes captured graphs.
    """

    captures = True

    def __init__(self, config: Config):
        """Starts JAX. Must come before anything else that asks JAX for its devices."""
        num_virtual = config.parallelism.num_devices or config.tpu_config.num_virtual_devices
        jax.config.update("jax_num_cpu_devices", num_virtual)
        if num_virtual > 1:
            # XLA's CPU client has as many threads as cores. A collective holds one per device until all have come, so with
            # few cores two programs in flight can hold all of them for ever. NPROC is XLA's name for that number.
            os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 4 * num_virtual)))
        if config.compile.cache_folder:
            # Everything is cached, however quickly it compiled: a second start compiles nothing.
            folder = pathlib.Path(config.compile.cache_folder).expanduser()
            jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        self._devices = jax.devices()
        self.num_devices = len(self._devices)
        self.process_index = jax.process_index()
        self.process_count = jax.process_count()
        self.device_kind = self._devices[0].device_kind

    def use_mesh(self, spec: MeshSpec) -> None:
        """Fixes the mesh of everything that follows."""
        self._spec = spec
        self._mesh: Mesh = jax_mesh(spec, self._devices)

    def compile(self, graph: StepGraph) -> XlaExecutable:
        """One program for all devices of the mesh."""
        return compile_xla(graph, self._devices)

    def initial_state(
        self, layouts: Mapping[str, TensorLayout], plan: Mapping[str, Initializer], seed: int
    ) -> dict[str, jax.Array]:
        """Parameters by their initialisers and everything else zero, each shard made on its own device."""
        abstract = abstract_arrays(layouts, self._spec, self._mesh)

        def make() -> dict[str, jax.Array]:
            return {
                name: sample(plan[name.removeprefix(PARAMS)], seed, name.removeprefix(PARAMS), array.shape, array.dtype)
                if name.startswith(PARAMS)
                else jax.numpy.zeros(array.shape, array.dtype)
                for name, array in abstract.items()
            }

        return jax.jit(make, out_shardings={name: array.sharding for name, array in abstract.items()})()

    def abstract_state(self, layouts: Mapping[str, TensorLayout]) -> dict[str, jax.ShapeDtypeStruct]:
        """What a checkpoint is restored onto."""
        return abstract_arrays(layouts, self._spec, self._mesh)

    def to_arrays(self, state: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The state as the checkpoint stores it."""
        return dict(state)

    def from_arrays(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The state as the step takes it."""
        return dict(arrays)

    def read(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Waits for a step's metrics and brings them to the host."""
        return {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}

    def wait(self, state: Mapping[str, jax.Array]) -> None:
        """Waits until the state has been computed."""
        jax.block_until_ready(dict(state))

    def close(self) -> None:
        """Nothing to end: JAX ends with the process."""
