"""`--rope_kernel.enable`: the rotary embedding of queries and keys as a kernel."""

import dataclasses

from torch import Tensor, nn

from titan.core.config.rewrite import Rule
from titan.kernels.rope.api import rotate_heads
from titan.models.layers.rope import RotaryConfig
from titan.train.config.run import Config


@dataclasses.dataclass(frozen=True)
class RotaryKernelConfig:
    """Configuration of `RotaryKernel`.

    Attributes:
      adjacent_pairs, implementation: see `rotate_heads`.
    """

    adjacent_pairs: bool
    implementation: str

    def build(self) -> "RotaryKernel":
        """The module, which has no parameters."""
        return RotaryKernel(self)


class RotaryKernel(nn.Module):
    """`titan.models.layers.rope.Rotary` by the kernel."""

    def __init__(self, config: RotaryKernelConfig):
        super().__init__()
        self.config = config

    def forward(self, x_BTND: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor) -> Tensor:
        """As `Rotary.forward`."""
        return rotate_heads(
            x_BTND.flatten(2),
            cos_B1TH.squeeze(1),
            sin_B1TH.squeeze(1),
            adjacent_pairs=self.config.adjacent_pairs,
            implementation=self.config.implementation,
        )


def rope_rules(config: Config) -> tuple[Rule, ...]:
    """Replaces the rotation where the flag is on, of every layer that has one."""
    kernel = config.rope_kernel
    if not kernel.enable:
        return ()
    return (
        Rule(
            name="rope_kernel",
            type=RotaryConfig,
            replace=lambda node: RotaryKernelConfig(node.adjacent_pairs, kernel.implementation),
        ),
    )
