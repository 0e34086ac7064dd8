"""Which nodes of a model's component tree a run replaces before the model is built: kernels, float8, attention.

A swap has a file of its own in this folder, with one function from the configuration to its rules: none where its flag
is off. This is the only room that knows both a model's layer and what takes its place.
"""

from collections.abc import Callable, Sequence
from typing import Any

from titan.core.config.rewrite import Rule, rewrite
from titan.train.config.run import Config
from titan.train.swaps.context_parallel import context_parallel_rules
from titan.train.swaps.fused_linear_cross_entropy import fused_linear_cross_entropy_rules
from titan.train.swaps.grouped_experts import grouped_experts_rules
from titan.train.swaps.rope import rope_rules
from titan.train.swaps.splash_attention import splash_attention_rules
from titan.train.swaps.vocabulary_cross_entropy import vocabulary_cross_entropy_rules

SWAPS: Sequence[Callable[[Config], Sequence[Rule]]] = (
    splash_attention_rules,
    fused_linear_cross_entropy_rules,
    vocabulary_cross_entropy_rules,
    grouped_experts_rules,
    rope_rules,
)
"""The swaps that a configuration may ask for. Two that would replace the same node are an error, in any order."""


def swap_rules(config: Config) -> list[Rule]:
    """The rules of all swaps that the configuration asks for, to be applied in one `rewrite`."""
    return [rule for swap in SWAPS for rule in swap(config)]


def with_swaps(tree: Any, config: Config) -> Any:
    """A component tree with the swaps that the configuration asks for, and then with what splits sequences."""
    return rewrite(rewrite(tree, swap_rules(config)), context_parallel_rules(config))
