"""The optimizers by name, titan's own and those of plugins. Imports no torch."""

from collections.abc import Callable
from typing import Any

from titan.core.registry import Registry
from titan.train.optimizers.optimizer import Optimizer

OPTIMIZERS: Registry[Callable[[Any], Optimizer]] = Registry("optimizer")
"""From the run's configuration to its optimizer, by the name that `--optimizer.name` takes."""


def register_optimizer(name: str, make: str) -> None:
    """Adds an optimizer.

    Args:
      name: what `--optimizer.name` calls it.
      make: "package.module:function" from a `titan.train.config.run.Config`, in which it finds `optimizer` and any
        section of its own (see `titan.core.config.sections`), to the `Optimizer`.

    Raises:
      RegistryError: the name is taken.
    """
    OPTIMIZERS.register(name, make)


def optimizer_names() -> tuple[str, ...]:
    """The names of all optimizers."""
    return tuple(OPTIMIZERS)


def make_optimizer(config: Any) -> Optimizer:
    """The optimizer of a run."""
    return OPTIMIZERS[config.optimizer.name](config)


register_optimizer("adamw", "titan.train.optimizers.adamw:make_adamw")
