"""The state of a run in the form that its steps take, and the same state weight by weight.

A run whose layers are loops has stacks [turn, ...] of their weights. Tensor parallelism has a weight in segments, as
the stack of them, where each of them is split (see `titan.parallel.segments`). Checkpoints and exported weights have
neither: they are layer by layer, under the names and with the shapes that the model has on one device.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from titan.parallel.layout import TensorLayout
from titan.parallel.segments import Segments

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Stacks:
    """Which entries of a state are stacks, and whose weights are in segments.

    Attributes:
      members: name of a stack to the names of its parts, first turn first.
      segments: name of an entry, stack or not, to the segments of each of its weights.
    """

    members: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    segments: Mapping[str, Segments] = dataclasses.field(default_factory=dict)

    def names(self, name: str) -> tuple[str, ...]:
        """The names that an entry of the state has layer by layer: those of its parts, or its own."""
        return self.members.get(name, (name,))

    def form(self, name: str) -> "EntryForm":
        """How an entry of the state is made of its weights."""
        return EntryForm(len(self.members[name]) if name in self.members else None, self.segments.get(name))

    def in_state(self, kinds: Sequence[str]) -> "Stacks":
        """The same for a state that has each entry once for each prefix."""
        members = {
            f"{kind}{name}": tuple(f"{kind}{member}" for member in members)
            for kind in kinds
            for name, members in self.members.items()
        }
        segments = {f"{kind}{name}": segments for kind in kinds for name, segments in self.segments.items()}
        return Stacks(members, segments)

    def unstacked_layouts(self, layouts: Mapping[str, TensorLayout]) -> dict[str, TensorLayout]:
        """The layouts of a state layer by layer."""
        return {
            member: self.form(name).weight_layout(layout)
            for name, layout in layouts.items()
            for member in self.names(name)
        }

    def stacked(self, values: Mapping[str, T], names: Sequence[str], stack: Callable[[list[T]], T]) -> dict[str, T]:
        """The entries `names` of a state out of values layer by layer, where `stack` joins those of one stack."""
        return {name: self.form(name).entry([values[member] for member in self.names(name)], stack) for name in names}

    def unstacked(self, state: Mapping[str, T], part: Callable[[T, int], T]) -> dict[str, T]:
        """A state layer by layer; `part` takes the entry of one turn out of a stack."""
        return {
            member: weight
            for name, value in state.items()
            for member, weight in zip(self.names(name), self.form(name).weights(value, part), strict=True)
        }


@dataclasses.dataclass(frozen=True)
class EntryForm:
    """How one entry of a state is made of weights.

    Attributes:
      num_turns: of a stack; None: it is one weight.
      segments: of each weight; None: they are not cut.
    """

    num_turns: int | None = None
    segments: Segments | None = None

    def entry(self, weights: Sequence[T], stack: Callable[[list[T]], T]) -> T:
        """The entry out of its weights, of which there is one where it is no stack."""
        cut = [weight if self.segments is None else self.segments.cut(weight) for weight in weights]
        return cut[0] if self.num_turns is None else stack(cut)

    def weight(self, entry: T, turn: int, part: Callable[[T, int], T]) -> T:
        """One weight out of the entry; where that is no stack, of any turn."""
        one = entry if self.num_turns is None else part(entry, turn)
        return one if self.segments is None else self.segments.joined(one)

    def weights(self, entry: T, part: Callable[[T, int], T]) -> tuple[T, ...]:
        """The inverse of `entry`."""
        return tuple(self.weight(entry, turn, part) for turn in range(self.num_turns or 1))

    def weight_layout(self, layout: TensorLayout) -> TensorLayout:
        """The layout of one weight out of that of the entry."""
        if self.num_turns is not None:
            layout = layout.unstacked()
        if self.segments is None:
            return layout
        return dataclasses.replace(layout.unstacked(), shape=self.segments.joined_shape(layout.shape))
