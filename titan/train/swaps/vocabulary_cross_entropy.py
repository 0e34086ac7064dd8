"""`--parallelism.tensor_parallel`: the loss over a vocabulary of which each device has a part of the logits."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan.core.config.rewrite import Rule
from titan.models.layers.cross_entropy import CrossEntropyConfig
from titan.parallel.mesh_axis import MeshAxis
from titan.parallel.module_boundaries import Axes
from titan.parallel.vocabulary import combined_statistics, first_entry
from titan.train.config.run import Config
from titan.train.sharding.mesh_axes import TENSOR_AXIS


@dataclasses.dataclass(frozen=True)
class VocabularyCrossEntropyConfig:
    """Configuration of `VocabularyCrossEntropy`.

    Attributes:
      ignore_index: the label of tokens that do not count.
      axis: the mesh axis along which the vocabulary is split.
    """

    ignore_index: int
    axis: str

    def build(self) -> "VocabularyCrossEntropy":
        """The module, which has no parameters."""
        return VocabularyCrossEntropy(self)


class VocabularyCrossEntropy(nn.Module):
    """`titan.models.layers.cross_entropy.CrossEntropy` for a head that gives the logits of this device's entries."""

    def __init__(self, config: VocabularyCrossEntropyConfig):
        super().__init__()
        self.config = config
        self.axis: MeshAxis | None = None

    def bind_axes(self, axes: Axes) -> None:
        """Takes the axis along which the vocabulary is split."""
        self.axis = axes[self.config.axis]

    def forward(self, hidden_BTE: Tensor, head: Callable[[Tensor], Tensor], labels_BT: Tensor) -> Tensor:
        """Returns the float32 scalar loss in nats, the sum over all tokens with a label, equal on all devices.

        Args:
          hidden_BTE: output of the final norm, of all tokens.
          head: the projection to the logits [B, T, V] of the V entries here.
          labels_BT: integer labels of the whole vocabulary; `ignore_index` where the token does not count.
        """
        logits_MV = head(hidden_BTE).float().flatten(0, 1)
        labels_M = labels_BT.flatten()
        index_V = torch.arange(logits_MV.shape[1], dtype=torch.int32, device=logits_MV.device)
        entry_V = first_entry(self.axis, logits_MV.shape[1]) + index_V
        # A comparison rather than a gather: its gradient is no scatter into the logits.
        label_logit_M = torch.where(labels_M.unsqueeze(1) == entry_V, logits_MV, 0.0).sum(1)
        logsumexp_M, label_logit_M = combined_statistics(torch.logsumexp(logits_MV, 1), label_logit_M, self.axis)
        # What is no entry makes the loss NaN, and the step is skipped: the split loss finds no index out of range.
        is_entry_M = (labels_M >= 0) & (labels_M < logits_MV.shape[1] * self.axis.size)
        losses_M = torch.where(is_entry_M, logsumexp_M - label_logit_M, float("nan"))
        return torch.where(labels_M != self.config.ignore_index, losses_M, 0.0).sum()


def vocabulary_cross_entropy_rules(config: Config) -> tuple[Rule, ...]:
    """Replaces the loss where a vocabulary is split; the fused loss knows of it by itself."""
    has_vocabulary = config.model.num_token_ids() is not None
    if config.parallelism.tensor_parallel == 1 or config.fused_linear_cross_entropy.enable or not has_vocabulary:
        return ()
    return (
        Rule(
            name="vocabulary_cross_entropy",
            type=CrossEntropyConfig,
            replace=lambda node: VocabularyCrossEntropyConfig(node.ignore_index, TENSOR_AXIS),
        ),
    )
