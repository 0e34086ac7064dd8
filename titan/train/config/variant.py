"""Variants of a recipe: the same training on given hardware, as data. Imports neither torch nor jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from titan.core.config.tree import replace_leaves
from titan.train.config.run import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What a recipe is on one TPU slice. The rest, the number of steps included, is the recipe's.

    Attributes:
      source: where the numbers come from.
      leaves: value by path of the leaf, e.g. {"parallelism.expert_parallel": 16}.
    """

    source: str
    leaves: Mapping[str, Any]

    def of(self, recipe: Config) -> Config:
        """The recipe's configuration on this hardware.

        Raises:
          KeyError: the recipe has no such leaf.
        """
        return replace_leaves(recipe, self.leaves)


Variants = Mapping[str, Variant]
"""Variants by the name of their slice, as `--hardware` takes it."""
