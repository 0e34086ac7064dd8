"""The pieces of a split step as JAX programs, lowered and not yet compiled."""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from titan.graph.executors.xla import partition_spec
from titan.graph.ir.digest import graph_digest
from titan.graph.lowering.dtypes import array_dtype
from titan.graph.lowering.lower import lower
from titan.graph.split.pieces import Loop, SplitStep, Straight
from titan.kernels.target import Target
from titan.parallel.layout import TensorLayout

_NOT_A_WORD = re.compile(r"\W+")


@dataclasses.dataclass(frozen=True)
class Form:
    """An array that goes into a program or comes out of it.

    Attributes:
      shape: the global shape.
      dtype: of the elements.
      spec: the mesh axes that shard each dim.
      is_local: whether it is each device's own value, [device, ...], rather than one that lies over the mesh.
      is_on_host: whether it lies in host memory.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    is_local: bool
    is_on_host: bool = False

    def abstract(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """What a program is lowered for."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding(mesh))

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """Where it lies."""
        return NamedSharding(mesh, self.spec, memory_kind="pinned_host" if self.is_on_host else None)


@dataclasses.dataclass(frozen=True)
class Turn:
    """How a loop's program is made of the graph of a turn.

    Attributes:
      num_carry: values that are carried.
      is_scanned: for each stack whether the program takes the whole and reads the turn's entry.
      is_written: for each stacked value whether the program writes it into a stack.
      is_reversed: whether the next turn is that of the entry before.
    """

    num_carry: int
    is_scanned: tuple[bool, ...]
    is_written: tuple[bool, ...]
    is_reversed: bool


@dataclasses.dataclass(frozen=True)
class Signature:
    """What makes a program: pieces with equal signatures have one program between them.

    Attributes:
      digest: of the graph.
      arguments, results: forms of all arrays in and out.
      donated: positions of the arguments whose memory the program may take over.
      turn: None of a straight piece.
    """

    digest: str
    arguments: tuple[Form, ...]
    results: tuple[Form, ...]
    donated: tuple[int, ...]
    turn: Turn | None


class Programs:
    """Makes the programs of a step's pieces.

    A straight piece's takes and gives what the piece does. A loop's takes the turn's index, what is carried, for each
    stack the whole or, where there is one value a turn, this turn's, what is shared, and the stacks to write to; it
    gives the index of the next turn, what is carried on, and for each stacked value this turn's or the stack.
    """

    def __init__(self, split: SplitStep, mesh: Mesh):
        """Initializes the instance.

        Args:
        split: the pieces.
        mesh: the devices to lower for.
        """
        graph, device = split.graph, mesh.devices.flat[0]
        self._split, self._mesh = split, mesh
        self._target = Target(device.platform, device.device_kind)
        layouts = {**graph.state, **graph.batch}
        outputs = [*(graph.state.values() if graph.updates_state else ()), *graph.metrics.values()]
        self._layouts: dict[str, TensorLayout] = {
            **{name: layouts[leaf] for name, leaf in split.inputs.items()},
            **dict(zip(split.pieces[-1].outputs, outputs, strict=True)),
        }

    def form(self, name: str) -> Form:
        """The form of a value on the devices; of a value for each turn, that of one."""
        if name in self._layouts:
            layout = self._layouts[name]
            return Form(layout.shape, array_dtype(layout.dtype), partition_spec(layout, self._split.graph.mesh), False)
        value = self._split.values[name]
        shape = value.shape[1:] if name in self._split.by_turn else value.shape
        axes = self._mesh.axis_names
        spec = PartitionSpec(axes) if axes else PartitionSpec()
        return Form((self._mesh.size, *shape), array_dtype(value.dtype), spec, True)

    def signature(self, piece: Straight | Loop, may_take: Collection[str]) -> Signature:
        """What the piece's program is.

        Args:
          may_take: names of values that nobody reads after the piece.
        """
        digest, arguments = graph_digest(piece.module), tuple(map(self.form, piece.inputs))
        results = tuple(map(self.form, piece.outputs))
        if isinstance(piece, Straight):
            taken = _matches(arguments, results, [name in may_take for name in piece.inputs])
            return Signature(digest, arguments, results, taken, None)
        turn = Turn(
            len(piece.carry),
            tuple(name not in self._split.by_turn for name in piece.stacks),
            tuple(zeros is not None for zeros in piece.zeros),
            piece.is_reversed,
        )
        index = Form((), np.dtype(np.int32), PartitionSpec(), False)
        stacked = [
            form if is_written else dataclasses.replace(form, is_on_host=True)
            for form, is_written in zip(results[turn.num_carry :], turn.is_written, strict=True)
        ]
        num_arguments = 1 + len(arguments)
        taken = (*range(1, 1 + turn.num_carry), *range(num_arguments - sum(turn.is_written), num_arguments))
        return Signature(digest, (index, *arguments), (index, *results[: turn.num_carry], *stacked), taken, turn)

    def lower(self, piece: Straight | Loop, signature: Signature, options: Mapping[str, str]) -> Any:
        """JAX's lowered program of a piece.

        Args:
          piece: one of the pieces.
          signature: what `signature` gave for it.
          options: XLA options.

        Raises:
          LoweringError: see `lower`.
        """
        function = lower(piece.module, target=self._target)
        if signature.turn:
            function = _one_turn(function, signature.turn)
        function = _within_device(function, signature)
        if self._mesh.axis_names:
            function = jax.shard_map(
                function,
                mesh=self._mesh,
                in_specs=tuple(form.spec for form in signature.arguments),
                out_specs=tuple(form.spec for form in signature.results),
                check_vma=False,  # see lower_xla
            )
        function.__name__ = f"piece_{_NOT_A_WORD.sub('_', piece.name)}"  # in profiles, and in the compile cache
        jitted = jax.jit(
            function,
            out_shardings=tuple(form.sharding(self._mesh) for form in signature.results),
            donate_argnums=signature.donated,
            compiler_options=dict(options),
        )
        return jitted.lower(*(form.abstract(self._mesh) for form in signature.arguments))


def _matches(arguments: Sequence[Form], results: Sequence[Form], is_free: Sequence[bool]) -> tuple[int, ...]:
    """The free arguments of the same forms as results, one for each result at most."""
    wanted = collections.Counter(results)
    taken = []
    for position, form in enumerate(arguments):
        if is_free[position] and wanted[form]:
            wanted[form] -= 1
            taken.append(position)
    return tuple(taken)


def _one_turn(body: Callable[..., tuple], turn: Turn) -> Callable[..., tuple]:
    """The function of a turn's program on one device's values."""
    num_stacks, num_written = len(turn.is_scanned), sum(turn.is_written)

    def run(index: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        carry, rest = arrays[: turn.num_carry], arrays[turn.num_carry :]
        stacks, rest = rest[:num_stacks], rest[num_stacks:]
        shared, written = rest[: len(rest) - num_written], iter(rest[len(rest) - num_written :])
        entries = (
            lax.dynamic_index_in_dim(stack, index, keepdims=False) if is_scanned else stack
            for stack, is_scanned in zip(stacks, turn.is_scanned, strict=True)
        )
        results = body(*carry, *entries, *shared)
        stacked = (
            lax.dynamic_update_index_in_dim(next(written), value, index, 0) if is_written else value
            for value, is_written in zip(results[turn.num_carry :], turn.is_written, strict=True)
        )
        return (index - 1 if turn.is_reversed else index + 1, *results[: turn.num_carry], *stacked)

    return run


def _within_device(function: Callable[..., tuple], signature: Signature) -> Callable[..., tuple]:
    """The function of arrays as they go into a program: of a device's own values they have one entry there."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        own = (
            lax.squeeze(array, (0,)) if form.is_local else array
            for array, form in zip(arrays, signature.arguments, strict=True)
        )
        return tuple(
            lax.expand_dims(result, (0,)) if form.is_local else result
            for result, form in zip(function(*own), signature.results, strict=True)
        )

    return run
