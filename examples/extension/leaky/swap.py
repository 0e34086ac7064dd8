"""`--squared_relu_kernel.enable`: the activation by the kernel."""

import dataclasses

from torch import Tensor, nn

from leaky.kernel import squared_relu
from leaky.model import SquaredReluConfig
from titan.core.config.rewrite import Rule
from titan.train.config.run import Config


@dataclasses.dataclass(frozen=True)
class SquaredReluKernel:
    """Configuration of `KernelActivation`."""

    block_rows: int

    def build(self) -> "KernelActivation":
        """The module, which has no parameters."""
        return KernelActivation(self.block_rows)


class KernelActivation(nn.Module):
    """`leaky.model.SquaredRelu` by the kernel."""

    def __init__(self, block_rows: int):
        super().__init__()
        self.block_rows = block_rows

    def forward(self, x: Tensor) -> Tensor:
        """[..., F] -> [..., F]."""
        out = squared_relu(x.flatten(0, -2), block_rows=self.block_rows, implementation="mosaic")
        return out.view(x.shape)


def squared_relu_rules(config: Config) -> tuple[Rule, ...]:
    """Replaces the activation of every block where the flag is on."""
    kernel = config.squared_relu_kernel
    if not kernel.enable:
        return ()
    return (
        Rule(
            name="squared_relu_kernel",
            type=SquaredReluConfig,
            replace=lambda node: SquaredReluKernel(kernel.block_rows),
        ),
    )
