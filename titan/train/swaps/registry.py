"""The swaps by name, titan's own and those of plugins. Imports no torch."""

from collections.abc import Callable, Sequence

from titan.core.config.rewrite import Rule
from titan.core.registry import Registry
from titan.train.config.run import Config

SwapRules = Callable[[Config], Sequence[Rule]]
"""From the configuration to the rules that a swap applies to the component tree: none where its flag is off."""

SWAPS: Registry[SwapRules] = Registry("swap")
"""The swaps that a configuration may ask for. Two that would replace the same node are an error, in any order."""


def register_swap(name: str, rules: str) -> None:
    """Adds a swap.

    Args:
      name: what errors call it, commonly the name of the section with its flag (see
        `titan.core.config.sections.register_section`).
      rules: "package.module:function", the function a `SwapRules`. It is imported when a model is built.

    Raises:
      RegistryError: the name is taken.
    """
    SWAPS.register(name, rules)


register_swap("splash_attention_kernel", "titan.train.swaps.splash_attention:splash_attention_rules")
register_swap(
    "fused_linear_cross_entropy", "titan.train.swaps.fused_linear_cross_entropy:fused_linear_cross_entropy_rules"
)
register_swap("vocabulary_cross_entropy", "titan.train.swaps.vocabulary_cross_entropy:vocabulary_cross_entropy_rules")
register_swap("grouped_matmul", "titan.train.swaps.grouped_experts:grouped_experts_rules")
register_swap("rope_kernel", "titan.train.swaps.rope:rope_rules")
