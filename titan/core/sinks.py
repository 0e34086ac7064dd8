"""Metrics sinks by name: where a run's numbers go besides the terminal and TensorBoard, as a plugin adds them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from titan.core.registry import Registry

if TYPE_CHECKING:
    import numpy as np


class Sink(Protocol):
    """Takes what a run reports. One process of a run has sinks, commonly the first."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the values of a step, by the names of `titan.core.metrics`."""

    def log_image(self, step: int, name: str, pixels: "np.ndarray") -> None:
        """Takes an image, uint8 [height, width, 3]."""

    def flush(self) -> None:
        """Writes what is buffered: a checkpoint follows, and a kill after it must leave no gap."""

    def close(self) -> None:
        """Ends the sink. May be called more than once."""


SINKS: Registry[Callable[..., Sink]] = Registry("metrics sink")
"""By name what makes a sink of (folder, resumed_step): the run's folder, and the step of the checkpoint or None."""


def register_sink(name: str, make: str) -> None:
    """Adds a sink.

    Args:
      name: what `--metrics.sinks` calls it.
      make: "package.module:function" that is called with `folder`, the run's folder as a str, and `resumed_step`, the
        step of the checkpoint that the run goes on from, or None; it returns the `Sink`.

    Raises:
      RegistryError: the name is taken.
    """
    SINKS.register(name, make)


def sink_names() -> tuple[str, ...]:
    """The names of all sinks."""
    return tuple(SINKS)
