"""`--fused_linear_cross_entropy.enable`: the head's matmul and the loss as one op."""

import dataclasses
import functools
from collections.abc import Callable

from torch import Tensor, nn

from titan.core.config.rewrite import Rule
from titan.kernels.fused_linear_cross_entropy.api import fused_linear_cross_entropy
from titan.kernels.fused_linear_cross_entropy.tiles import LinearCrossEntropyTiles
from titan.kernels.fused_linear_cross_entropy.vocab_shard import VocabShard
from titan.models.layers.cross_entropy import CrossEntropyConfig
from titan.models.layers.head import SoftCappedHead
from titan.parallel.mesh_axis import MeshAxis
from titan.parallel.module_boundaries import Axes
from titan.parallel.vocabulary import combined_statistics, first_entry
from titan.train.config.run import Config
from titan.train.sharding.mesh_axes import TENSOR_AXIS


@dataclasses.dataclass(frozen=True)
class FusedCrossEntropyConfig:
    """Configuration of `FusedCrossEntropy`.

    Attributes:
      ignore_index: the label of tokens that do not count.
      z_loss, gradients, tiles, implementation: see `fused_linear_cross_entropy`.
      vocabulary_axis: the mesh axis along which the head's weight is split; empty: it is whole.
    """

    ignore_index: int
    z_loss: float
    gradients: str
    tiles: LinearCrossEntropyTiles
    implementation: str
    vocabulary_axis: str = ""

    def build(self) -> "FusedCrossEntropy":
        """The module, which has no parameters."""
        return FusedCrossEntropy(self)


class FusedCrossEntropy(nn.Module):
    """`titan.models.layers.cross_entropy.CrossEntropy` by the fused kernel."""

    def __init__(self, config: FusedCrossEntropyConfig):
        super().__init__()
        self.config = config
        self.axis: MeshAxis | None = None

    def bind_axes(self, axes: Axes) -> None:
        """Takes the axis along which the vocabulary is split, if it is."""
        if self.config.vocabulary_axis:
            self.axis = axes[self.config.vocabulary_axis]

    def forward(self, hidden_BTE: Tensor, head: Callable[[Tensor], Tensor], labels_BT: Tensor) -> Tensor:
        """Returns the float32 scalar loss in nats, the sum over all tokens with a label.

        Args:
          hidden_BTE: output of the final norm.
          head: the head's module, or a method of it; what counts is its weight [V, E] and, if it has one, its cap. V is
            the entries here where the vocabulary is split.
          labels_BT: integer labels; `ignore_index` where the token does not count.
        """
        module = getattr(head, "__self__", head)  # a tied embedding's `project` is a method
        weight_VE = module.weight
        cap = {"scale": module.scale, "soft_cap": module.soft_cap} if isinstance(module, SoftCappedHead) else {}
        return fused_linear_cross_entropy(
            hidden_BTE.to(weight_VE.dtype),
            weight_VE,
            labels_BT,
            ignore_index=self.config.ignore_index,
            z_loss=self.config.z_loss,
            gradients=self.config.gradients,
            tiles=self.config.tiles,
            implementation=self.config.implementation,
            shard=self._shard(weight_VE.shape[0]),
            **cap,
        )

    def _shard(self, num_entries: int) -> VocabShard | None:
        if self.axis is None:
            return None
        combine = functools.partial(combined_statistics, axis=self.axis)
        return VocabShard(first_entry(self.axis, num_entries), num_entries * self.axis.size, combine)


def fused_linear_cross_entropy_rules(config: Config) -> tuple[Rule, ...]:
    """Replaces the loss where the flag is on."""
    kernel = config.fused_linear_cross_entropy
    if not kernel.enable:
        return ()
    tiles = LinearCrossEntropyTiles(**kernel.tiles())
    axis = TENSOR_AXIS if config.parallelism.tensor_parallel > 1 else ""
    return (
        Rule(
            name="fused_linear_cross_entropy",
            type=CrossEntropyConfig,
            replace=lambda node: FusedCrossEntropyConfig(
                node.ignore_index, kernel.z_loss, kernel.gradients, tiles, kernel.implementation, axis
            ),
        ),
    )
