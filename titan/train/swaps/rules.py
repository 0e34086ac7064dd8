"""Which nodes of a model's component tree a run replaces before the model is built: kernels, float8, attention.

A swap has a file of its own in this folder, or in a plugin's package, with one function from the configuration to its
rules. This is the only place that knows both a model's layer and what takes its place.
"""

from typing import Any

from titan.core.config.rewrite import NoMatchError, rewrite
from titan.core.config.validate import ConfigError
from titan.train.config.run import Config
from titan.train.swaps.context_parallel import context_parallel_rules
from titan.train.swaps.registry import SWAPS


def with_swaps(tree: Any, config: Config) -> Any:
    """A component tree with the swaps that the configuration asks for, and then with what splits sequences.

    Raises:
      ConfigError: a swap that is asked for has nothing to replace in this model.
      RewriteError: two swaps would replace the same node.
    """
    by_swap = {name: rules(config) for name, rules in SWAPS.items()}
    try:
        swapped = rewrite(tree, [rule for rules in by_swap.values() for rule in rules])
    except NoMatchError as error:
        (swap,) = (name for name, rules in by_swap.items() if error.rule in [rule.name for rule in rules])
        raise ConfigError(
            swap, f"{config.model.family} has no part that it would take the place of", "leave it out"
        ) from error
    return rewrite(swapped, context_parallel_rules(config))
