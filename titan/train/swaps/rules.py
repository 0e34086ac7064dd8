"""Which nodes of a model's component tree a run replaces before the model is built: kernels, float8, attention.

A swap has a file of its own in this folder, or in a plugin's package, with one function from the configuration to its
rules. This is the only place that knows both a model's layer and what takes its place.
"""

from typing import Any

from titan.core.config.rewrite import Rule, rewrite
from titan.train.config.run import Config
from titan.train.swaps.context_parallel import context_parallel_rules
from titan.train.swaps.registry import SWAPS


def swap_rules(config: Config) -> list[Rule]:
    """The rules of all swaps that the configuration asks for, to be applied in one `rewrite`."""
    return [rule for _, rules in SWAPS.items() for rule in rules(config)]


def with_swaps(tree: Any, config: Config) -> Any:
    """A component tree with the swaps that the configuration asks for, and then with what splits sequences."""
    return rewrite(rewrite(tree, swap_rules(config)), context_parallel_rules(config))
