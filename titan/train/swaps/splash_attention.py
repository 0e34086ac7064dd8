"""`--splash_attention_kernel.enable`: the inner attention of every layer by the splash kernel."""

import dataclasses

from torch import Tensor, nn

from titan.core.config.rewrite import Rule
from titan.kernels.splash_attention.api import splash_attention
from titan.kernels.splash_attention.tiles import SplashTiles
from titan.models.layers.attention import AttentionMask, InnerAttentionConfig
from titan.train.config.run import Config
from titan.train.swaps.split_mask import SplitMask


@dataclasses.dataclass(frozen=True)
class SplashAttentionConfig(InnerAttentionConfig):
    """Configuration of `SplashAttention`.

    Attributes:
      tiles: block sizes.
      implementation: see `splash_attention`.
    """

    tiles: SplashTiles = dataclasses.field(default_factory=SplashTiles)
    implementation: str = "auto"

    def build(self) -> "SplashAttention":
        """The module, which has no parameters."""
        return SplashAttention(self)


class SplashAttention(nn.Module):
    """Attention within segments, from the segment ids alone: the [T, T] form of the mask is never computed."""

    def __init__(self, config: SplashAttentionConfig):
        super().__init__()
        self.config = config

    def forward(self, q_BNTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: AttentionMask | SplitMask) -> Tensor:
        """Attends from each query to the keys of its segment and window; returns [B, N, T, D] in q's dtype."""
        is_split = isinstance(mask, SplitMask)
        return splash_attention(
            q_BNTD,
            k_BKSD,
            v_BKSD,
            mask.segment_ids_BT,
            *((mask.kv_segment_ids_BS, mask.query_starts_C) if is_split else ()),
            causal=self.config.causal,
            window=self.config.window,
            scale=self.config.scale,
            tiles=self.config.tiles,
            implementation=self.config.implementation,
        )


def splash_attention_rules(config: Config) -> tuple[Rule, ...]:
    """Replaces every inner attention where the flag is on."""
    kernel = config.splash_attention_kernel
    if not kernel.enable:
        return ()
    tiles = SplashTiles(**kernel.tiles())
    return (
        Rule(
            name="splash_attention",
            type=InnerAttentionConfig,
            replace=lambda node: SplashAttentionConfig(
                node.scale, node.window, node.causal, tiles, kernel.implementation
            ),
        ),
    )
