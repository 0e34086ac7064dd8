"""`--parallelism.context_parallel`: each device attends from its tokens to all of their sequence."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from titan.core.config.rewrite import Rule
from titan.models.layers.attention import (
    CausalSegmentMaskConfig,
    InnerAttentionConfig,
    SegmentMaskConfig,
)
from titan.models.layers.image_times import ImageTimesConfig
from titan.parallel.context_parallel import gather_set, gather_tokens
from titan.parallel.mesh_axis import MeshAxis
from titan.train.config.run import Config
from titan.train.sharding.mesh_axes import SEQUENCE_AXIS
from titan.train.swaps.split_image_times import SplitImageTimesConfig
from titan.train.swaps.split_mask import SplitMask, SplitMaskConfig, SplitSegmentMaskConfig


@dataclasses.dataclass(frozen=True)
class GatheredAttentionConfig:
    """Configuration of `GatheredAttention`.

    Attributes:
      inner: node of the attention proper, which takes a `SplitMask`.
      axis: the mesh axis that splits sequences.
    """

    inner: Any
    axis: str

    def build(self) -> "GatheredAttention":
        """The module, which has no parameters; it runs on a mesh with that axis alone."""
        return GatheredAttention(self)


class GatheredAttention(nn.Module):
    """Attention from this device's queries to the keys and values of whole sequences, gathered along the axis."""

    def __init__(self, config: GatheredAttentionConfig):
        super().__init__()
        self.config = config
        self.inner = config.inner.build()

    def bind_axes(self, axes: Mapping[str, MeshAxis]) -> None:
        """Takes the axes of the mesh that it runs on."""
        self._axis = axes[self.config.axis]

    def forward(self, q_BNTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, mask: SplitMask) -> Tensor:
        """Attends from each query to the keys that mask and window allow; returns [B, N, T, D] in q's dtype."""
        gather = gather_tokens if self.config.inner.causal else gather_set
        k_BKSD, v_BKSD = (gather(x, self._axis, dim=2) for x in (k_BKTD, v_BKTD))
        return self.inner(q_BNTD, k_BKSD, v_BKSD, mask)


def context_parallel_rules(config: Config) -> tuple[Rule, ...]:
    """Replaces masks and wraps inner attentions, those put in by other swaps included, where sequences are split."""
    if config.parallelism.context_parallel == 1:
        return ()
    split = {CausalSegmentMaskConfig: SplitMaskConfig, SegmentMaskConfig: SplitSegmentMaskConfig}
    return (
        # Not optional: a mask that is not split would be wrong in silence.
        Rule(
            name="split_mask",
            type=tuple(split),
            replace=lambda node: split[type(node)](SEQUENCE_AXIS),
        ),
        Rule(
            name="split_times",
            type=ImageTimesConfig,
            replace=SplitImageTimesConfig(SEQUENCE_AXIS),
            optional=True,
        ),
        Rule(
            name="gathered_attention",
            type=InnerAttentionConfig,
            replace=lambda node: GatheredAttentionConfig(node, SEQUENCE_AXIS),
        ),
    )
