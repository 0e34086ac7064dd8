"""The state of a run whose layers are loops, with stacks [turn, ...], and the same state layer by layer.

Checkpoints and exported weights are always layer by layer, under the names that the model has without loops.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from titan.parallel.layout import TensorLayout

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Stacks:
    """Which entries of a state are stacks.

    Attributes:
      members: name of a stack to the names of its parts, first turn first.
    """

    members: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def names(self, name: str) -> tuple[str, ...]:
        """The names that an entry of the state has layer by layer: those of its parts, or its own."""
        return self.members.get(name, (name,))

    def in_state(self, kinds: Sequence[str]) -> "Stacks":
        """The same for a state that has each entry once for each prefix."""
        return Stacks(
            {
                f"{kind}{name}": tuple(f"{kind}{member}" for member in members)
                for kind in kinds
                for name, members in self.members.items()
            }
        )

    def unstacked_layouts(self, layouts: Mapping[str, TensorLayout]) -> dict[str, TensorLayout]:
        """The layouts of a state layer by layer."""
        return {
            member: layout.unstacked() if name in self.members else layout
            for name, layout in layouts.items()
            for member in self.names(name)
        }

    def stacked(self, values: Mapping[str, T], names: Sequence[str], stack: Callable[[list[T]], T]) -> dict[str, T]:
        """The entries `names` of a state out of values layer by layer, where `stack` joins those of one stack."""
        return {
            name: stack([values[member] for member in self.members[name]]) if name in self.members else values[name]
            for name in names
        }

    def unstacked(self, state: Mapping[str, T], part: Callable[[T, int], T]) -> dict[str, T]:
        """A state layer by layer; `part` takes the entry of one turn out of a stack."""
        return {
            member: part(value, turn) if name in self.members else value
            for name, value in state.items()
            for turn, member in enumerate(self.names(name))
        }
