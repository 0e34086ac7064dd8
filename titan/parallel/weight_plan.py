"""What parallelism other than data parallelism asks of one weight: tensor, sequence and expert parallelism."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class WeightPlan:
    """How one weight lies along mesh axes of which each device computes a part of the model.

    The module's own code sees its device's slice along `shards`, and the full weight along every other axis.

    Attributes:
      shards: mesh axis to the dim of the weight that it splits. Never gathered, and no gradient is summed over it.
      partial: mesh axes along which each device has only a part of the gradient though the weight is whole, as that of
        a norm whose tokens are split: the gradient is summed over them.

    Raises:
      ValueError: an axis is in both.
    """

    shards: Mapping[str, int] = dataclasses.field(default_factory=dict)
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if both := sorted(set(self.shards) & set(self.partial)):
            raise ValueError(f"a weight that axis {both[0]} splits has no gradient to be summed over it")


WeightPlans = Mapping[str, WeightPlan]
"""Fully qualified name of a weight to its plan; a weight that is not named is data-parallel alone."""


def merged_plans(*parts: WeightPlans) -> dict[str, WeightPlan]:
    """What several kinds of parallelism, each along an axis of its own, ask of the weights together.

    Raises:
      ValueError: two of them ask something of a weight along one axis.
    """
    merged: dict[str, WeightPlan] = {}
    for name, plan in (item for part in parts for item in part.items()):
        before = merged.get(name, WeightPlan())
        if twice := {*before.shards, *before.partial} & {*plan.shards, *plan.partial}:
            raise ValueError(f"two plans for weight {name} along axis {sorted(twice)[0]}")
        merged[name] = WeightPlan({**before.shards, **plan.shards}, (*before.partial, *plan.partial))
    return merged
