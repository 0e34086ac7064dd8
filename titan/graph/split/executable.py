"""The xla executor of a step in pieces: programs that are compiled one by one and run one after the other.

What a forward loop keeps for its backward lies in host memory in between, one value for each turn. A turn's values are
fetched while the turn before it runs.
"""

import concurrent.futures
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from titan.core.progress import progress
from titan.graph.executors.xla import Arrays, jax_mesh, place_batch
from titan.graph.ir.step_graph import StepGraph
from titan.graph.split.pieces import Loop, SplitStep, Straight, split_step
from titan.graph.split.programs import Programs, Signature

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program.

    Attributes:
      name: what it does.
      compiled: JAX's compiled program, or what else `compile_split` was told to make.
      compile_seconds: time in the XLA compiler, or to load its result from the disk cache.
    """

    name: str
    compiled: Any
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class SplitExecutable:
    """A compiled step in pieces; called as `XlaExecutable` is.

    Attributes:
      split: the pieces.
      mesh: the devices that it runs on.
      signatures: of each piece's program.
      programs: each once.
      lower_seconds: time to lower all of them to StableHLO.
      compile_seconds: time until all were compiled, less that.
    """

    split: SplitStep
    mesh: Mesh
    signatures: tuple[Signature, ...]
    programs: Mapping[Signature, Program]
    lower_seconds: float
    compile_seconds: float

    @property
    def graph(self) -> StepGraph:
        """What was compiled."""
        return self.split.graph

    def __call__(self, state: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> tuple[Arrays, Arrays]:
        """Runs one step and returns when the last program has been started; see `XlaExecutable`."""
        given = {**state, **batch}
        values: dict[str, Any] = {name: given[leaf] for name, leaf in self.split.inputs.items()}
        for piece, signature, unread in zip(self.split.pieces, self.signatures, self._unread, strict=True):
            run = self.programs[signature].compiled
            if isinstance(piece, Loop):
                self._run_loop(piece, run, values, unread)
            else:
                values.update(zip(piece.outputs, run(*(values[name] for name in piece.inputs)), strict=True))
            for name in unread:
                values.pop(name, None)
        outputs = [values[name] for name in self.split.pieces[-1].outputs]
        num_state = len(self.graph.state) if self.graph.updates_state else 0
        return dict(zip(list(self.graph.state)[:num_state], outputs[:num_state], strict=True)), dict(
            zip(self.graph.metrics, outputs[num_state:], strict=True)
        )

    def place(self, batch: Mapping[str, np.ndarray]) -> Arrays:
        """Starts the transfer of a batch to the devices; see `XlaExecutable`."""
        return place_batch(self.graph, self.mesh, batch)

    def _run_loop(self, loop: Loop, run: Callable[..., tuple], values: dict[str, Any], unread: frozenset[str]) -> None:
        """Runs all turns; takes what goes in from `values` and puts there what comes out."""
        turns = range(loop.num_turns)[:: -1 if loop.is_reversed else 1]
        carry = [values.pop(name) for name in loop.carry]
        stacks = [values.pop(name) for name in loop.zeros if name]
        shared = [values[name] for name in loop.shared]
        kept = {
            name: [None] * loop.num_turns for name, zeros in zip(loop.stacked, loop.zeros, strict=True) if zeros is None
        }
        index = self._first_turn(turns[0])
        is_fetching = not self.split.by_turn.isdisjoint(loop.stacks)
        entries = self._fetch(loop, turns[0], values, unread)
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            before, (index, *results) = index, run(index, *carry, *entries, *shared, *stacks)
            carry, stacked = results[: len(carry)], results[len(carry) :]
            stacks = [value for value, zeros in zip(stacked, loop.zeros, strict=True) if zeros]
            for (name, value), zeros in zip(zip(loop.stacked, stacked, strict=True), loop.zeros, strict=True):
                if zeros is None:
                    kept[name][turn] = value
            if following is not None:
                if is_fetching:
                    before.block_until_ready()  # the turn before this one has ended: its values have made room
                entries = self._fetch(loop, following, values, unread)
        values.update(zip(loop.carried, carry, strict=True))
        values.update(kept)
        values.update(
            zip((name for name, zeros in zip(loop.stacked, loop.zeros, strict=True) if zeros), stacks, strict=True)
        )

    def _fetch(self, loop: Loop, turn: int, values: dict[str, Any], unread: frozenset[str]) -> list[jax.Array]:
        """What a turn's program takes for the loop's stacks: the whole, or of one value a turn this one's."""
        fetched = []
        for name in loop.stacks:
            value = values[name]
            if name in self.split.by_turn:
                value = jax.device_put(value[turn], value[turn].sharding.with_memory_kind(None))
                if name in unread:
                    values[name][turn] = None
            fetched.append(value)
        return fetched

    @functools.cached_property
    def _unread(self) -> list[frozenset[str]]:
        return last_reads(self.split)

    @functools.cached_property
    def _first_turn(self) -> Callable[[int], jax.Array]:
        replicated = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        return functools.cache(lambda turn: jax.device_put(np.int32(turn), replicated))


def last_reads(split: SplitStep) -> list[frozenset[str]]:
    """For each piece the values that it reads or makes and that no later piece reads."""
    later = set(split.pieces[-1].outputs)
    found = []
    for piece in reversed(split.pieces):
        found.append(frozenset({*piece.inputs, *piece.outputs} - later))
        later |= found[-1]
    return found[::-1]


def compile_split(
    graph: StepGraph,
    devices: Sequence[jax.Device],
    *,
    compiler_options: Mapping[str, str] | None = None,
    compile_program: Callable[[Any], Any] = lambda lowered: lowered.compile(),
) -> SplitExecutable:
    """Cuts a step and compiles each distinct piece once, several at a time, the largest first.

    Args:
      graph: the step after its passes.
      devices: see `lower_xla`.
      compiler_options: XLA options for all programs.
      compile_program: compiles one of JAX's lowered programs; called in several threads.

    Raises:
      LoweringError, ValueError: see `lower_xla`.
      Exception: what `compile_program` raises; programs that have not been begun are left out then.
    """
    split, mesh = split_step(graph), jax_mesh(graph.mesh, devices)
    maker = Programs(split, mesh)
    kept = set() if graph.updates_state else set(graph.state)
    inputs = {name for name, leaf in split.inputs.items() if leaf in graph.batch or leaf in kept}
    signatures = tuple(
        maker.signature(piece, unread - inputs) for piece, unread in zip(split.pieces, last_reads(split), strict=True)
    )
    distinct: dict[Signature, Straight | Loop] = {}
    for signature, piece in zip(signatures, split.pieces, strict=True):
        distinct.setdefault(signature, piece)
    start, lower_seconds = time.perf_counter(), 0.0
    started = {}
    with (
        progress("compiling pieces", total=len(distinct)) as work,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        try:
            for signature, piece in sorted(distinct.items(), key=lambda item: -len(item[1].module.graph.nodes)):
                begin = time.perf_counter()
                lowered = maker.lower(piece, signature, compiler_options or {})
                lower_seconds += time.perf_counter() - begin
                started[signature] = pool.submit(_compile, piece.name, lowered, compile_program)
                started[signature].add_done_callback(lambda _: work.advance())
            programs = {signature: started[signature].result() for signature in distinct}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    seconds = time.perf_counter() - start - lower_seconds
    _log.debug("%d pieces, %d programs, compiled in %.2f s", len(split.pieces), len(programs), seconds)
    return SplitExecutable(split, mesh, signatures, programs, lower_seconds, seconds)


def _compile(name: str, lowered: Any, compile_program: Callable[[Any], Any]) -> Program:
    start = time.perf_counter()
    compiled = compile_program(lowered)
    return Program(name, compiled, time.perf_counter() - start)
