"""The double-stream block: text and image have weights of their own and attend to each other.

Shapes: B batch, P images of a row, X text tokens, I image tokens, T either of them, E model dim, N heads, D head
dim, F = N D.
"""

import dataclasses
from typing import Any

from torch import Tensor, nn

from titan.models.flux.feed_forward import GeluFeedForwardConfig
from titan.models.flux.modulation import ModulationConfig, modulated_norm
from titan.models.flux.qkv import QkvConfig, joined
from titan.models.layers.attention import AttentionMask
from titan.models.layers.linear import LinearConfig


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """Configuration of `Stream`; each attribute is the node of the child of that name.

    Attributes:
      modulation: gives shift, scale and gate of attention, and then those of the feed-forward.
      projection: linear, E to 3 N D.
      qkv: splits that.
      out: linear, N D to E.
      feed_forward: maps [B, T, E] to [B, T, E].
    """

    modulation: ModulationConfig
    projection: LinearConfig
    qkv: QkvConfig
    out: LinearConfig
    feed_forward: GeluFeedForwardConfig

    def build(self) -> "Stream":
        """The module, on the current default device."""
        return Stream(self)


class Stream(nn.Module):
    """The weights of one kind of token. It is no function of its own: attention stands between its two parts."""

    def __init__(self, config: StreamConfig):
        super().__init__()
        self.modulation = config.modulation.build()
        self.projection = config.projection.build()
        self.qkv = config.qkv.build()
        self.out = config.out.build()
        self.feed_forward = config.feed_forward.build()

    def read(self, x_BTE: Tensor, vectors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, T, N, D], given the six vectors of the modulation."""
        shift, scale = vectors[:2]
        return self.qkv(self.projection(modulated_norm(x_BTE, shift, scale)))

    def write(self, x_BTE: Tensor, attended_BTF: Tensor, vectors: list[Tensor]) -> Tensor:
        """The residual stream after attention, whose heads [B, T, N D] are given, and the feed-forward."""
        _, _, gate, ff_shift, ff_scale, ff_gate = vectors
        x_BTE = x_BTE + gate * self.out(attended_BTF)
        return x_BTE + ff_gate * self.feed_forward(modulated_norm(x_BTE, ff_shift, ff_scale))


@dataclasses.dataclass(frozen=True)
class DoubleBlockConfig:
    """Configuration of `DoubleBlock`; each attribute is the node of the child of that name.

    Attributes:
      text: the weights of text.
      image: the weights of images.
      rotary: node whose module maps (x_BTND, what the model's rope gives) to rotated heads [B, N, T, D].
      inner: node whose module maps (q_BNTD, k_BNTD, v_BNTD, AttentionMask) to [B, N, T, D].
    """

    text: StreamConfig
    image: StreamConfig
    rotary: Any
    inner: Any

    def build(self) -> "DoubleBlock":
        """The module, on the current default device."""
        return DoubleBlock(self)


class DoubleBlock(nn.Module):
    """Joint attention of text and image, and a feed-forward for each, all modulated and gated."""

    def __init__(self, config: DoubleBlockConfig):
        super().__init__()
        self.text = config.text.build()
        self.image = config.image.build()
        self.rotary = config.rotary.build()
        self.inner = config.inner.build()

    def forward(
        self, streams: tuple[Tensor, Tensor], conditioning_BPE: Tensor, rope: tuple[Tensor, ...], mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        """Maps the residual streams (text [B, X, E], image [B, I, E]) to the next ones.

        Args:
          streams: text and image.
          conditioning_BPE: the vector of each image.
          rope: what the rope gives for the whole sequence, text first.
          mask: of the whole sequence.
        """
        text_BXE, image_BIE = streams
        text_ids_BX, image_ids_BI = mask.segment_ids_BT.split((text_BXE.shape[1], image_BIE.shape[1]), dim=1)
        of_text = self.text.modulation(conditioning_BPE, text_ids_BX)
        of_image = self.image.modulation(conditioning_BPE, image_ids_BI)
        q_BTND, k_BTND, v_BTND = joined(self.text.read(text_BXE, of_text), self.image.read(image_BIE, of_image))
        attended_BNTD = self.inner(self.rotary(q_BTND, *rope), self.rotary(k_BTND, *rope), v_BTND.transpose(1, 2), mask)
        attended_BTF = attended_BNTD.transpose(1, 2).flatten(2)
        text_BXF, image_BIF = attended_BTF.split((text_BXE.shape[1], image_BIE.shape[1]), dim=1)
        return self.text.write(text_BXE, text_BXF, of_text), self.image.write(image_BIE, image_BIF, of_image)
