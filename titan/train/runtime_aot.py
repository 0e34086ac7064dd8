"""The devices of a TPU slice that is not there: steps are compiled for them, and nothing is placed on them."""

import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping

import jax
from torch.distributed.device_mesh import DeviceMesh

from titan.core.config.validate import ConfigError
from titan.core.hardware import accelerator_present
from titan.core.tpu_slice import TpuSlice
from titan.graph.aot.compiler_dump import CompilerDump, dump_options, read_dump
from titan.graph.aot.out_of_memory import out_of_device_memory
from titan.graph.capture import StepFunction
from titan.graph.executors.xla import XlaExecutable, lower_xla
from titan.graph.passes.cross_entropy_backward import cross_entropy_backward
from titan.graph.step_graph import StepGraph
from titan.kernels.tpu_topology import topology_devices
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec
from titan.train.compiled_step import Executable
from titan.train.device_order import mesh_order
from titan.train.runtime import CompileTarget
from titan.train.stacks import Stacks
from titan.train.swaps.refusals import kernel_refusals


class AotRuntime(CompileTarget):
    """A TPU slice by name, as the compiler knows it.

    Attributes:
      mesh, state_layouts: of the run, once `prepare` was called.
      compiler_version: the build of libtpu.
      dump: what the compiler wrote of the program compiled last, whether it fits or not.
    """

    passes = (cross_entropy_backward,)
    process_count = 1  # one program for all hosts

    def __init__(self, tpu_slice: TpuSlice, *, topology_aware: bool = True, cubes: bool = True):
        """Loads libtpu, which describes the slice.

        Args:
          tpu_slice: what to compile for.
          topology_aware: whether mesh axes run along rings of the slice; else devices are taken as libtpu lists them.
          cubes: whether shards of 64 chips are cubes; see `topology.assign`.

        Raises:
          ConfigError: the libtpu package is not installed, or it knows no such slice.
        """
        if jax.config.jax_platforms is None and not accelerator_present():
            # Else JAX would start libtpu for this machine's own TPUs first.
            jax.config.update("jax_platforms", "cpu")
        try:
            self._devices = topology_devices(tpu_slice.topology, num_slices=tpu_slice.num_slices)
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(
                "hardware", f"libtpu has no slice {tpu_slice}: {error}", "name another, or update libtpu"
            ) from error
        except RuntimeError as error:
            problem, _, cure = str(error).partition(": ")
            raise ConfigError("aot", problem, cure) from error
        self._topology_aware, self._cubes = topology_aware, cubes
        self.num_devices = len(self._devices)
        self.device_kind = self._devices[0].device_kind
        # Of several lines; which libtpu is loaded is not always the one that is installed (TPU_LIBRARY_PATH).
        self.compiler_version = self._devices[0].client.platform_version.splitlines()[-1]
        self.mesh = MeshSpec((), ())
        self.state_layouts: dict[str, TensorLayout] = {}
        self.dump = CompilerDump("", "", "", "")

    def prepare(self, spec: MeshSpec, layouts: Mapping[str, TensorLayout], stacks: Stacks) -> None:
        """Keeps mesh and layouts, and puts the devices into mesh order."""
        if self._topology_aware:
            self._devices = tuple(mesh_order(self._devices, spec, cubes=self._cubes))
        self.mesh = spec
        self.state_layouts = dict(layouts)

    def compile(self, graph: StepGraph, seconds: dict[str, float]) -> XlaExecutable:
        """Compiles for the slice; adds what it took to the stages `lower` and `compile`.

        Raises:
          OutOfDeviceMemoryError: the program does not fit into a device's memory.
          ConfigError: the blocks of a kernel do not fit its vector memory.
        """
        # Libraries of kernels take the TPU's generation from JAX's default device.
        with tempfile.TemporaryDirectory() as folder:
            with jax.default_device(self._devices[0]), kernel_refusals():
                lowered = lower_xla(graph, self._devices, compiler_options=dump_options(pathlib.Path(folder)))
            seconds["lower"] += lowered.lower_seconds
            start = time.perf_counter()
            try:
                return lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                raise (out_of_device_memory(str(error)) or error) from error
            finally:
                seconds["compile"] += time.perf_counter() - start
                self.dump = read_dump(pathlib.Path(folder))

    def uncaptured(self, make_step: Callable[[DeviceMesh | None], StepFunction]) -> Executable:
        """Not there: captured graphs alone are compiled ahead of time."""
        raise NotImplementedError("only captured steps are compiled ahead of time")
