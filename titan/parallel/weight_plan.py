"""What parallelism other than data parallelism asks of one weight: tensor, sequence and expert parallelism."""

import dataclasses
from collections.abc import Mapping

from titan.parallel.segments import Segments


@dataclasses.dataclass(frozen=True)
class WeightPlan:
    """How one weight lies along mesh axes of which each device computes a part of the model.

    The module's own code sees its device's slice along `shards`, and the full weight along every other axis.

    Attributes:
      shards: mesh axis to the dim of the weight that it splits. Never gathered, and no gradient is summed over it.
      partial: mesh axes along which each device has only a part of the gradient though the weight is whole, as that of
        a norm whose tokens are split: the gradient is summed over them.
      segments: of the dim that an axis splits, each of which it splits; None: the dim is one. The weight is stored as
        the stack of them, of which `shards` names the dims without the first.
      num_shares: of a weight that is added to each of so many parts of a sum, as the bias of a projection whose input
        is split: a device uses one share of it. What it has as the share's gradient, that of the sum, is the weight's.

    Raises:
      ValueError: an axis is in both.
    """

    shards: Mapping[str, int] = dataclasses.field(default_factory=dict)
    partial: tuple[str, ...] = ()
    segments: Segments | None = None
    num_shares: int = 1

    def __post_init__(self) -> None:
        if both := sorted(set(self.shards) & set(self.partial)):
            raise ValueError(f"a weight that axis {both[0]} splits has no gradient to be summed over it")

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The global shape in which a weight of this shape is stored.

        Raises:
          ValueError: it has no such segments.
        """
        return shape if self.segments is None else self.segments.cut_shape(shape)


WeightPlans = Mapping[str, WeightPlan]
"""Fully qualified name of a weight to its plan; a weight that is not named is data-parallel alone."""


def merged_plans(*parts: WeightPlans) -> dict[str, WeightPlan]:
    """What several kinds of parallelism, each along an axis of its own, ask of the weights together.

    Raises:
      ValueError: two of them ask something of a weight along one axis, or both for segments or shares.
    """
    merged: dict[str, WeightPlan] = {}
    for name, plan in (item for part in parts for item in part.items()):
        before = merged.get(name, WeightPlan())
        if twice := {*before.shards, *before.partial} & {*plan.shards, *plan.partial}:
            raise ValueError(f"two plans for weight {name} along axis {sorted(twice)[0]}")
        if (before.segments and plan.segments) or min(before.num_shares, plan.num_shares) > 1:
            raise ValueError(f"two plans for the segments or the shares of weight {name}")
        merged[name] = WeightPlan(
            {**before.shards, **plan.shards},
            (*before.partial, *plan.partial),
            before.segments or plan.segments,
            max(before.num_shares, plan.num_shares),
        )
    return merged
