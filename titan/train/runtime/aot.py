"""The devices of a TPU slice that is not there: steps are compiled for them, and nothing is placed on them."""

import hashlib
import importlib.util
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping

import jax
from torch.distributed.device_mesh import DeviceMesh

from titan.core.config.validate import ConfigError
from titan.core.hardware import accelerator_present
from titan.graph.aot.compiler_dump import dump_options, read_dump
from titan.graph.aot.out_of_memory import OutOfDeviceMemoryError, out_of_device_memory
from titan.graph.aot.program import CompiledProgram, compiled_program, read_program, write_program
from titan.graph.capture.trace import StepFunction
from titan.graph.executors.fingerprint import compiler_fingerprint, program_digest
from titan.graph.executors.xla import XlaExecutable, lower_xla
from titan.graph.ir.step_graph import StepGraph
from titan.graph.lowering.table import LoweringError
from titan.graph.split.executable import SplitExecutable, compile_split
from titan.graph.torch_tpu.lower import lower_by_torch_tpu
from titan.kernels.tpu_topology import MissingLibtpuError, topology_devices
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec
from titan.train.config.run import Config
from titan.train.runtime.compiled_step import Executable
from titan.train.runtime.compiler_options import compiler_options
from titan.train.runtime.interface import CompileTarget
from titan.train.runtime.saved_step import open_saved_step, step_fingerprint
from titan.train.sharding.device_order import mesh_order
from titan.train.step.stored_form import Stacks
from titan.train.swaps.refusals import kernel_refusals


class AotRuntime(CompileTarget):
    """A TPU slice by name, as the compiler knows it.

    Attributes:
      mesh, state_layouts: of the run, once `prepare` was called.
      compiler_version: the build of libtpu.
      compiler_options: given to the compiler beyond its defaults.
      program: what the compiler says of the program compiled last, whether it fits or not.
      saved_step: the step that `--aot.load` names; None where it names none. It is taken in place of compiling.
      fingerprint: of the training step compiled last, where `--aot.save` or `--aot.load` is given.
    """

    executor = "xla"

    def __init__(self, config: Config):
        """Loads libtpu, which describes the slice.

        Args:
          config: with `hardware`.

        Raises:
          ConfigError: the libtpu package is not installed, it knows no such slice or no such compiler option;
            `--aot.load` names no saved step; or TorchTPU is to lower and is not installed.
        """
        tpu_slice = config.tpu_slice
        if config.aot.lowering == "torch_tpu" and importlib.util.find_spec("torch_tpu") is None:
            raise ConfigError(
                "aot.lowering",
                "the torch_tpu package is not installed",
                "pip install --no-deps torch_tpu==0.2.0 frozendict immutabledict portpicker pyzmq, or leave it out",
            )
        self._config = config
        self.saved_step = open_saved_step(config.aot.load) if config.aot.load else None
        if jax.config.jax_platforms is None and not accelerator_present():
            # Else JAX would start libtpu for this machine's own TPUs first.
            jax.config.update("jax_platforms", "cpu")
        try:
            self._devices = topology_devices(tpu_slice.topology, num_slices=tpu_slice.num_slices)
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(
                "hardware", f"libtpu has no slice {tpu_slice}: {error}", "name another, or update libtpu"
            ) from error
        except MissingLibtpuError as error:
            raise ConfigError("aot", error.problem, error.cure) from error
        self.num_devices = len(self._devices)
        self.device_kind = self._devices[0].device_kind
        # Of several lines; which libtpu is loaded is not always the one that is installed (TPU_LIBRARY_PATH).
        self.compiler_version = self._devices[0].client.platform_version.splitlines()[-1]
        self.compiler_options = compiler_options(config.compile, self._devices[0])
        self.mesh = MeshSpec((), ())
        self.state_layouts: dict[str, TensorLayout] = {}
        self.program: CompiledProgram | None = None
        self.fingerprint: dict[str, str] = {}

    def prepare(self, spec: MeshSpec, layouts: Mapping[str, TensorLayout], stacks: Stacks) -> None:
        """Keeps mesh and layouts, and puts the devices into mesh order."""
        parallelism = self._config.parallelism
        if parallelism.topology_aware:
            self._devices = tuple(mesh_order(self._devices, spec, cubes=parallelism.hsdp_cubes))
        self.mesh = spec
        self.device_processes = [0] * spec.num_devices  # one program for all hosts
        self.state_layouts = dict(layouts)

    def compile(self, graph: StepGraph, seconds: dict[str, float]) -> XlaExecutable | SplitExecutable:
        """Compiles for the slice; adds what it took to the stages `lower` and `compile`.

        Returns:
          The compiled step. Of a split step the programs are `CompiledProgram`s: what is known of them, fit or not.

        Raises:
          OutOfDeviceMemoryError: the program of a step that is one does not fit into a device's memory.
          ConfigError: the blocks of a kernel do not fit its vector memory, TorchTPU does not lower the step, or what
            `--aot.load` names is not this step.
        """
        if self._config.aot.lowering == "torch_tpu":
            start = time.perf_counter()
            try:
                graph = lower_by_torch_tpu(graph)
            except LoweringError as error:
                raise ConfigError("aot.lowering", str(error), "leave it out: titan's own lowering may do it") from error
            seconds["lower"] += time.perf_counter() - start
        if self._config.tpu_config.use_graph_split:
            return self._compile_split(graph, seconds)
        # Libraries of kernels take the TPU's generation from JAX's default device.
        with jax.default_device(self._devices[0]), kernel_refusals():
            lowered = lower_xla(graph, self._devices, compiler_options=self.compiler_options)
        seconds["lower"] += lowered.lower_seconds
        if self.saved_step or self._config.aot.save:
            config = self._config.resolve_devices(self.num_devices)
            self.fingerprint = step_fingerprint(config, lowered, self.compiler_options)
        if self.saved_step:
            self.saved_step.check(self.fingerprint)
            return XlaExecutable(graph, lowered.mesh, None, lowered.lower_seconds, 0.0)
        compiled, self.program = _compile(lowered.lowered)
        seconds["compile"] += self.program.compile_seconds
        if compiled is None:
            capacity = self._config.tpu_slice.hardware.usable_hbm_bytes
            raise OutOfDeviceMemoryError(self.program.needed_bytes, capacity)
        return XlaExecutable(graph, lowered.mesh, compiled, lowered.lower_seconds, self.program.compile_seconds)

    def _compile_split(self, graph: StepGraph, seconds: dict[str, float]) -> SplitExecutable:
        folder = None
        if self._config.compile.cache_folder:
            folder = pathlib.Path(self._config.compile.cache_folder).expanduser() / "ahead_of_time"
        common = compiler_fingerprint(self._devices, self.compiler_options)

        def compile_program(lowered: jax.stages.Lowered) -> CompiledProgram:
            if folder is None:
                return _compile(lowered)[1]
            parts = [*(f"{name} {value}" for name, value in common.items()), program_digest(lowered.as_text())]
            path = folder / f"{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()}.json.gz"
            program = read_program(path)
            if program is None:
                _, program = _compile(lowered)
                write_program(path, program)
            return program

        with jax.default_device(self._devices[0]), kernel_refusals():
            executable = compile_split(
                graph, self._devices, compiler_options=self.compiler_options, compile_program=compile_program
            )
        seconds["lower"] += executable.lower_seconds
        seconds["compile"] += executable.compile_seconds
        return executable

    def uncaptured(
        self, make_step: Callable[[DeviceMesh | None], StepFunction], batch: Mapping[str, TensorLayout]
    ) -> Executable:
        """Not there: captured graphs alone are compiled ahead of time."""
        raise NotImplementedError("only captured steps are compiled ahead of time")


def _compile(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled | None, CompiledProgram]:
    """The program, None if it does not fit into a device's memory, and what the compiler says of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        start = time.perf_counter()
        try:
            compiled = lowered.compile(compiler_options=dump_options(folder))
        except jax.errors.JaxRuntimeError as error:
            exceeded = out_of_device_memory(str(error))
            if exceeded is None:
                raise
            seconds = time.perf_counter() - start
            return None, CompiledProgram(read_dump(folder), False, exceeded.needed_bytes, None, None, None, seconds)
        return compiled, compiled_program(compiled, read_dump(folder), time.perf_counter() - start)
