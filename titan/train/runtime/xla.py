"""The devices of the xla executor: starting JAX, placing the initial state, reading values back."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.distributed.device_mesh import DeviceMesh

from titan.core.config.validate import ConfigError
from titan.core.hardware import find_generation
from titan.core.init import Initializer, sample
from titan.core.metrics import MetricsConfig, Peak, resolve_peak
from titan.graph.capture.trace import StepFunction
from titan.graph.executors.xla import LoweredStep, XlaExecutable, abstract_arrays, jax_mesh, lower_xla
from titan.graph.ir.step_graph import StepGraph
from titan.graph.split.executable import SplitExecutable, compile_split
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec
from titan.train.config.run import Config
from titan.train.runtime.compiled_step import Executable
from titan.train.runtime.compiler_options import compiler_options
from titan.train.runtime.environment import configure_jax
from titan.train.runtime.interface import Runtime
from titan.train.runtime.saved_step import open_saved_step, save_step, step_fingerprint
from titan.train.sharding.device_order import mesh_order
from titan.train.step.state import PARAMS
from titan.train.step.stored_form import EntryForm, Stacks
from titan.train.swaps.refusals import kernel_refusals


class XlaRuntime(Runtime):
    """JAX's devices: accelerators where there are any, else virtual CPU devices."""

    executor = "xla"
    saves = True  # Orbax has every process write its shards
    captures_late = True

    def __init__(self, config: Config):
        """Starts JAX. Must come before anything else that asks JAX for its devices.

        Raises:
          ConfigError: the TPU's compiler has no such option, `--aot.load` names no saved step, the CPU devices cannot
            be spread equally over the processes, this is one of several processes and has not joined the others, or
            the TPUs are of no generation that titan knows.
        """
        self._config = config
        self._saved_step = open_saved_step(config.aot.load) if config.aot.load else None
        # A program out of the cache cannot be written to --aot.save: XLA:CPU has lost a part of it by then.
        cache_folder = "" if config.aot.save else config.compile.cache_folder
        configure_jax(num_virtual_devices=_num_virtual_devices(config), cache_folder=cache_folder)
        self._topology_aware, self._cubes = config.parallelism.topology_aware, config.parallelism.hsdp_cubes
        self._devices = jax.devices()
        self.num_devices = len(self._devices)
        self.process_index = jax.process_index()
        self.process_count = jax.process_count()
        if self.process_count > 1 and not jax.distributed.is_initialized():
            raise ConfigError(
                "distributed.enable",
                f"this is process {self.process_index} of {self.process_count} on the hosts of a slice, and they have "
                "not joined",
                "add --distributed on all of them",
            )
        self._all_devices = Mesh(np.array(self._devices), ("device",))
        self._largest = jax.jit(jax.numpy.max, out_shardings=NamedSharding(self._all_devices, PartitionSpec()))
        self._agreeing: jax.Array | None = None
        self.device_kind = self._devices[0].device_kind
        if self._devices[0].platform == "tpu" and find_generation(self.device_kind) is None:
            raise ConfigError(
                "plugins",
                f"this machine's TPUs are of the kind {self.device_kind!r}, which titan does not know",
                "name a plugin that registers their generation (docs/extending.md)",
            )
        self._compiler_options = compiler_options(config.compile, self._devices[0])

    def prepare(self, spec: MeshSpec, layouts: Mapping[str, TensorLayout], stacks: Stacks) -> None:
        """Fixes the mesh of everything that follows, the layout of each entry of the state, and which are stacked.

        Raises:
          ConfigError: the slices do not divide the mesh's axes, or a run of several processes has not all devices.
        """
        if self.process_count > 1 and spec.num_devices != len(self._devices):
            raise ConfigError(
                "parallelism.num_devices",
                f"a run takes all devices of its {self.process_count} processes, {len(self._devices)}, and "
                f"{spec.num_devices} are asked for",
                "leave it out, and --parallelism.use_simple_fsdp on",
            )
        self._spec = spec
        if self._topology_aware:
            self._devices = mesh_order(self._devices, spec, cubes=self._cubes)
        self.device_processes = [device.process_index for device in self._devices[: spec.num_devices]]
        self._mesh: Mesh = jax_mesh(spec, self._devices)
        self._abstract = abstract_arrays(layouts, spec, self._mesh)
        self._stacks = stacks
        self._abstract_by_layer = abstract_arrays(stacks.unstacked_layouts(layouts), spec, self._mesh)

    def compile(self, graph: StepGraph, seconds: dict[str, float]) -> XlaExecutable | SplitExecutable:
        """One program for all devices of the mesh, or several; adds what it took to the stages `lower` and `compile`.

        Raises:
          ConfigError: the blocks of a kernel do not fit, or what `--aot.load` names is not this training step.
        """
        options = self._compiler_options
        if self._config.tpu_config.use_graph_split:
            with kernel_refusals():
                executable = compile_split(graph, self._devices, compiler_options=options)
        else:
            with kernel_refusals():
                lowered = lower_xla(graph, self._devices, compiler_options=options)
            executable = self._compile(lowered)
        seconds["lower"] += executable.lower_seconds
        seconds["compile"] += executable.compile_seconds
        return executable

    def _compile(self, lowered: LoweredStep) -> XlaExecutable:
        aot = self._config.aot
        if not lowered.graph.updates_state or not (aot.save or self._saved_step):
            return lowered.compile()
        config = self._config.resolve_devices(self.num_devices)
        wanted = step_fingerprint(config, lowered, self._compiler_options)
        if self._saved_step:
            return self._saved_step.load(lowered, wanted)
        executable = lowered.compile()
        if self.process_index == 0:
            save_step(aot.save, executable, wanted)
        return executable

    def uncaptured(
        self, make_step: Callable[[DeviceMesh | None], StepFunction], batch: Mapping[str, TensorLayout]
    ) -> Executable:
        """Not there: JAX runs captured graphs alone."""
        raise NotImplementedError("the xla executor runs captured steps alone")

    def initial_state(self, plan: Mapping[str, Initializer], seed: int) -> dict[str, jax.Array]:
        """Parameters by their initialisers and everything else zero, each shard made on its own device."""
        abstract, stacks = self._abstract, self._stacks

        def parameter(name: str, array: jax.ShapeDtypeStruct) -> jax.Array:
            parts = [member.removeprefix(PARAMS) for member in stacks.names(name)]
            shape = self._abstract_by_layer[stacks.names(name)[0]].shape
            values = [sample(plan[part], seed, part, shape, array.dtype) for part in parts]
            return stacks.form(name).entry(values, jax.numpy.stack)

        def make() -> dict[str, jax.Array]:
            return {
                name: parameter(name, array) if name.startswith(PARAMS) else jax.numpy.zeros(array.shape, array.dtype)
                for name, array in abstract.items()
            }

        return jax.jit(make, out_shardings={name: array.sharding for name, array in abstract.items()})()

    def place_parameters(self, weights: Mapping[str, torch.Tensor]) -> dict[str, jax.Array]:
        """Parameters of the state from whole tensors on the host; each device gets its shard."""
        names = [name for name in self._abstract if name.startswith(PARAMS)]
        whole = self._stacks.stacked({f"{PARAMS}{fqn}": weight for fqn, weight in weights.items()}, names, torch.stack)
        placed = {}
        for name, weight in whole.items():
            abstract = self._abstract[name]
            array = weight.to(torch.float32).numpy().astype(abstract.dtype)
            placed[name] = jax.make_array_from_callback(abstract.shape, abstract.sharding, array.__getitem__)
        return placed

    def host_parameters(self, state: Mapping[str, jax.Array]) -> dict[str, torch.Tensor]:
        """The parameters as whole tensors on the host of process 0, by fully qualified name; {} on the others.

        One parameter of one layer is gathered at a time.
        """
        weights = {}
        for name, array in state.items():
            if not name.startswith(PARAMS):
                continue
            form = self._stacks.form(name)
            for turn, member in enumerate(self._stacks.names(name)):
                weight = array
                if form != EntryForm():
                    sharding = self._abstract_by_layer[member].sharding
                    weight = jax.jit(_weight(form), out_shardings=sharding)(array, np.int32(turn))
                whole = self._on_host(weight)
                if self.process_index == 0:
                    weights[member.removeprefix(PARAMS)] = torch.from_numpy(whole)
        return weights

    def _on_host(self, array: jax.Array) -> np.ndarray:
        """All of an array; where other processes have a part of it, each device has the whole meanwhile."""
        if not array.is_fully_addressable:
            replicated = NamedSharding(self._mesh, PartitionSpec())
            array = jax.jit(operator.pos, out_shardings=replicated)(array).addressable_data(0)
        return np.array(array)

    def abstract_state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What a checkpoint is restored onto."""
        return self._abstract_by_layer

    def to_arrays(self, state: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The state as the checkpoint stores it.

        Weights out of stacks and segments are made in host memory where a device has memory of its own, which may have
        no room for a second copy of the state.
        """
        memory = "pinned_host" if self._devices[0].platform != "cpu" else None
        arrays = {}
        for name, array in state.items():
            form, members = self._stacks.form(name), self._stacks.names(name)
            if form == EntryForm():
                arrays[name] = array
                continue
            sharding = self._abstract_by_layer[members[0]].sharding
            if memory:
                sharding = sharding.with_memory_kind(memory)
            arrays.update(
                zip(members, jax.jit(_weights(form), out_shardings=(sharding,) * len(members))(array), strict=True)
            )
        return arrays

    def from_arrays(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The state as the step takes it. What becomes part of a new array is deleted: there may be no room for two."""
        state = {}
        for name, abstract in self._abstract.items():
            parts = [arrays[member] for member in self._stacks.names(name)]
            form = self._stacks.form(name)
            if form == EntryForm():
                state[name] = parts[0]
                continue
            state[name] = jax.jit(_entry(form), out_shardings=abstract.sharding)(*parts)
            for part in parts:
                part.delete()
        return state

    def read(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Waits for a step's metrics and brings them to the host."""
        return {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}

    def fetch(self, outputs: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
        """Waits for what a step gives, arrays that every device has whole, and brings them to the host."""
        return {name: np.asarray(value) for name, value in outputs.items()}

    def peak(self, config: MetricsConfig) -> Peak:
        """The peak that MFU is measured against."""
        return resolve_peak(config, self._devices[: self._spec.num_devices])

    def agree(self, number: int) -> int:
        """The largest `number` of all processes; every process must call it, and waits for the others."""
        return number if self.process_count == 1 else int(self._agree(number))

    def agree_by_next(self, number: int) -> int:
        """The largest `number` of all processes: of several, that of the call before, and 0 at the first.

        So the devices need not be waited for: the maximum of the call before was computed right after a step whose
        metrics have been read since.
        """
        if self.process_count == 1:
            return number
        before, self._agreeing = self._agreeing, self._agree(number)
        return 0 if before is None else int(before)

    def _agree(self, number: int) -> jax.Array:
        """The largest `number` of all processes, under way."""
        here = np.full(jax.local_device_count(), number, np.int32)
        by_device = NamedSharding(self._all_devices, PartitionSpec("device"))
        return self._largest(jax.make_array_from_process_local_data(by_device, here))

    def done_at(self) -> None:
        """None: a step that was just called is still being computed."""
        return None

    def close(self) -> None:
        """Waits for the other processes: at the end of a process JAX does so too, but not for long."""
        self.agree(0)


def _num_virtual_devices(config: Config) -> int:
    """Devices of each process on a machine without an accelerator."""
    num_devices, num_processes = config.parallelism.num_devices, config.distributed.num_known_processes
    if num_devices % num_processes:
        raise ConfigError(
            "parallelism.num_devices",
            f"{num_devices} devices cannot be spread equally over {num_processes} processes",
            f"give a multiple of {num_processes}, or leave it out",
        )
    return num_devices // num_processes or config.tpu_config.num_virtual_devices


# One function for each form: JAX compiles a function once for all arrays of one shape.
@functools.cache
def _weight(form: EntryForm) -> Callable[[jax.Array, Any], jax.Array]:
    return lambda entry, turn: form.weight(entry, turn, operator.getitem)


@functools.cache
def _weights(form: EntryForm) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    return lambda entry: form.weights(entry, operator.getitem)


@functools.cache
def _entry(form: EntryForm) -> Callable[..., jax.Array]:
    return lambda *weights: form.entry(weights, jax.numpy.stack)
