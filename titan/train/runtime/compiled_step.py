"""A step that is compiled for the shapes of the batches it meets; a new shape is a recompile, counted and logged."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

_log = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]


class Executable(Protocol):
    """What an executor makes of a step for given shapes."""

    def __call__(self, state: Mapping[str, Any], batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Runs one step on placed tensors: (new state, metrics)."""

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Moves this process's part of a batch to its devices."""


class CompiledStep:
    """Executables of one step, by the shapes of the batch.

    Attributes:
      recompiles: how often a batch of a new shape came after the first.
    """

    def __init__(self, name: str, compile_for: Callable[[Shapes], Executable]):
        """Initializes the instance.

        Args:
        name: the step's name in the log.
        compile_for: makes the executable for the shapes of this process's batch.
        """
        self.recompiles = 0
        self._name = name
        self._compile_for = compile_for
        self._executables: dict[tuple, Executable] = {}
        self._last: Shapes = {}

    def executable_for(self, batch: Mapping[str, np.ndarray]) -> Executable:
        """The executable for a batch of these shapes, compiled now if they are new."""
        return self.executable_for_shapes({name: tuple(np.shape(array)) for name, array in batch.items()})

    def executable_for_shapes(self, shapes: Shapes) -> Executable:
        """The executable for a batch of these shapes, by name, compiled now if they are new."""
        key = tuple(sorted(shapes.items()))
        if key not in self._executables:
            if self._executables:
                self.recompiles += 1
                _log.warning("recompiling %s (%d): %s", self._name, self.recompiles, _changes(self._last, shapes))
            self._executables[key] = self._compile_for(shapes)
        self._last = shapes
        return self._executables[key]


def _changes(old: Shapes, new: Shapes) -> str:
    changed = [
        f"{name} {old.get(name)} -> {new.get(name)}" for name in sorted({*old, *new}) if old.get(name) != new.get(name)
    ]
    return ", ".join(changed)
