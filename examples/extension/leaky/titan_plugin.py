"""What this package adds to titan. It is imported before flags are parsed, and so imports neither torch nor JAX."""

from leaky.config import SquaredReluKernelConfig
from titan.core.config.sections import register_section
from titan.graph.lowering.registry import register_lowerings
from titan.graph.passes.registry import register_pass
from titan.models.registry import register_family
from titan.train.optimizers.registry import register_optimizer
from titan.train.recipes.registry import register_recipe
from titan.train.swaps.registry import register_swap

register_family("leaky.config:LeakyConfig")
register_lowerings("leaky.lowering")
register_section("squared_relu_kernel", SquaredReluKernelConfig())
register_swap("squared_relu_kernel", "leaky.swap:squared_relu_rules")
register_pass("reciprocals", "leaky.reciprocals:reciprocals", before="common_subexpressions")
register_optimizer("signed_momentum", "leaky.optimizer:make_signed_momentum")
register_recipe("leaky_debug", "leaky.recipe:RECIPE", "leaky.recipe:VARIANTS")
