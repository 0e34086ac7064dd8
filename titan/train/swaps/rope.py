"""`--rope_kernel.enable`: the rotary embedding of queries and keys as a kernel."""

import dataclasses

from torch import Tensor, nn

from titan.core.config.rewrite import Rule
from titan.kernels.rope.api import rotate_heads
from titan.models.layers.rope import RotaryConfig
from titan.train.config import Config


@dataclasses.dataclass(frozen=True)
class RotaryKernelConfig:
    """Configuration of `RotaryKernel`.

    Attributes:
      implementation: see `rotate_heads`.
    """

    implementation: str

    def build(self) -> "RotaryKernel":
        """The module, which has no parameters."""
        return RotaryKernel(self)


class RotaryKernel(nn.Module):
    """`titan.models.layers.rope.Rotary` by the kernel."""

    def __init__(self, config: RotaryKernelConfig):
        super().__init__()
        self.implementation = config.implementation

    def forward(self, x_BTND: Tensor, cos_B1TH: Tensor, sin_B1TH: Tensor) -> Tensor:
        """As `Rotary.forward`."""
        return rotate_heads(
            x_BTND.flatten(2), cos_B1TH.squeeze(1), sin_B1TH.squeeze(1), implementation=self.implementation
        )


def rope_rules(config: Config) -> tuple[Rule, ...]:
    """Replaces the rotation of every layer where the flag is on."""
    kernel = config.rope_kernel
    if not kernel.enable:
        return ()
    return (Rule(name="rope_kernel", type=RotaryConfig, replace=RotaryKernelConfig(kernel.implementation)),)
