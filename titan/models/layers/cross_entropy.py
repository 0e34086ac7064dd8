"""Head projection and token cross-entropy as one node, so that a fused or chunked version can take its place."""

import dataclasses
from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class CrossEntropyConfig:
    """Configuration of `CrossEntropy`.

    Attributes:
      ignore_index: the label of tokens that do not count.
    """

    ignore_index: int = -100

    def build(self) -> "CrossEntropy":
        """The module, which has no parameters."""
        return CrossEntropy(self)


class CrossEntropy(nn.Module):
    """The sum of the cross-entropies of all tokens with a label."""

    def __init__(self, config: CrossEntropyConfig):
        super().__init__()
        self.ignore_index = config.ignore_index

    def forward(self, hidden_BTE: Tensor, head: Callable[[Tensor], Tensor], labels_BT: Tensor) -> Tensor:
        """Returns the float32 scalar loss in nats, a sum and no mean: who knows the global token count divides.

        Args:
          hidden_BTE: output of the final norm.
          head: the projection to logits, the head's module or the tied embedding's `project`.
          labels_BT: integer labels; `ignore_index` where the token does not count.
        """
        logits = head(hidden_BTE).float().flatten(0, 1)
        return F.cross_entropy(logits, labels_BT.flatten().long(), ignore_index=self.ignore_index, reduction="sum")
