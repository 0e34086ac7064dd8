"""The passes of a step by name, in the order in which they run, titan's own and those of plugins. Imports no torch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from titan.core.registry import RegistryError, load
from titan.graph.passes.options import PassOptions

if TYPE_CHECKING:
    from titan.graph.passes.pipeline import Pass


@dataclasses.dataclass(frozen=True)
class PassEntry:
    """Where a pass is found, and for whom it is.

    Attributes:
      function: "package.module:function", imported when a step is compiled.
      executors: names of the executors whose graphs it is for; empty: all.
      is_configured: whether the function makes the pass from `PassOptions` (or None, for none) rather than being it.
    """

    function: str
    executors: tuple[str, ...] = ()
    is_configured: bool = False

    def make(self, name: str, options: PassOptions) -> "Pass | None":
        """The pass, named `name`; None where the options ask for none."""
        step: Callable[..., Any] | None = load(self.function)
        if self.is_configured:
            step = step(options)
        if step is None or step.__name__ == name:
            return step

        @functools.wraps(step)
        def named(graph: Any) -> Any:
            return step(graph)

        named.__name__ = name
        return named


_PASSES: dict[str, PassEntry] = {}


def register_pass(
    name: str,
    function: str,
    *,
    before: str = "",
    executors: tuple[str, ...] = (),
    is_configured: bool = False,
) -> None:
    """Adds a pass, at the end or before another one.

    Args:
      name: what `--tpu_config.disable_passes` and dumps of the graph call it.
      function: "package.module:function", from a `titan.graph.ir.step_graph.StepGraph` to another one.
      before: name of the pass that it comes before; empty: it is the last one.
      executors: names of the executors whose graphs it is for; empty: all.
      is_configured: whether the function is given `PassOptions` and returns the pass, or None for none.

    Raises:
      RegistryError: the name is taken, or there is no pass of the name `before`.
    """
    entry = PassEntry(function, executors, is_configured)
    if name in _PASSES:
        if _PASSES[name] == entry:
            return
        raise RegistryError(f"there are two passes {name!r}: {_PASSES[name].function} and {function}")
    if before and before not in _PASSES:
        raise RegistryError(f"pass {name!r} is to come before {before!r}, and there is none: {', '.join(_PASSES)}")
    order = list(_PASSES.items())
    place = list(_PASSES).index(before) if before else len(order)
    order.insert(place, (name, entry))
    _PASSES.clear()
    _PASSES.update(order)


def pass_names() -> tuple[str, ...]:
    """The names of all passes, in order."""
    return tuple(_PASSES)


def passes_for(executor: str, options: PassOptions) -> "tuple[Pass, ...]":
    """The passes of an executor's graphs, in order.

    Raises:
      MemoryPolicyError: the options' memory policy is none.
    """
    entries = [item for item in _PASSES.items() if not item[1].executors or executor in item[1].executors]
    steps = [entry.make(name, options) for name, entry in entries]
    return tuple(step for step in steps if step is not None)


register_pass("no_ops", "titan.graph.passes.no_ops:no_ops")
register_pass("common_subexpressions", "titan.graph.passes.common_subexpressions:common_subexpressions")
register_pass("dead_code", "titan.graph.passes.dead_code:dead_code")
register_pass("memory_policy", "titan.graph.passes.memory_policy:configured_memory_policy", is_configured=True)
register_pass(
    "cross_entropy_backward",
    "titan.graph.passes.cross_entropy_backward:cross_entropy_backward",
    executors=("xla",),
)
