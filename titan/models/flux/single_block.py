"""The single-stream block: text and image as one sequence, attention and feed-forward side by side.

The two read the same input and share one output matrix, as in ViT-22B (Dehghani et al., 2023, arXiv:2302.05442).

Shapes: B batch, P images of a row, T tokens, E model dim, F inner dim of the feed-forward, N heads, D head dim.
"""

import dataclasses
import fractions
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.models.flux.modulation import ModulationConfig, modulated_norm
from titan.models.flux.qkv import QkvConfig
from titan.models.layers.attention import AttentionMask
from titan.models.layers.linear import LinearConfig


@dataclasses.dataclass(frozen=True)
class FusedProjectionConfig:
    """Configuration of `FusedProjection`.

    Attributes:
      linear: linear, E to 3 N D + F.
      qkv_dim: 3 N D.
    """

    linear: LinearConfig
    qkv_dim: int

    def build(self) -> "FusedProjection":
        """The module, on the current default device."""
        return FusedProjection(self)


class FusedProjection(nn.Module):
    """Both projections of a single block as one linear, whose result is split."""

    def __init__(self, config: FusedProjectionConfig):
        super().__init__()
        self.linear = config.linear.build()
        self.share = fractions.Fraction(config.qkv_dim, config.linear.out_dim)

    def forward(self, x_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, 3 N D] for queries, keys and values, and [B, T, F] for the feed-forward."""
        both = self.linear(x_BTE)
        qkv_dim = int(self.share * both.shape[-1])  # of a device's part of both
        return both.split((qkv_dim, both.shape[-1] - qkv_dim), dim=-1)


@dataclasses.dataclass(frozen=True)
class SplitProjectionConfig:
    """Configuration of `SplitProjection`; each attribute is the node of the child of that name.

    Attributes:
      qkv: linear, E to 3 N D.
      feed_forward: linear, E to F.
    """

    qkv: LinearConfig
    feed_forward: LinearConfig

    def build(self) -> "SplitProjection":
        """The module, on the current default device."""
        return SplitProjection(self)


class SplitProjection(nn.Module):
    """Both projections of a single block as linears of their own: no copy of a part of a common result."""

    def __init__(self, config: SplitProjectionConfig):
        super().__init__()
        self.qkv = config.qkv.build()
        self.feed_forward = config.feed_forward.build()

    def forward(self, x_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """As `FusedProjection.forward`."""
        return self.qkv(x_BTE), self.feed_forward(x_BTE)


@dataclasses.dataclass(frozen=True)
class SingleBlockConfig:
    """Configuration of `SingleBlock`; each attribute is the node of the child of that name.

    Attributes:
      modulation: gives shift, scale and gate.
      projection: fused or split.
      qkv: splits what is for attention.
      rotary: see `DoubleBlockConfig`.
      inner: see `DoubleBlockConfig`.
      out: linear, N D + F to E.
    """

    modulation: ModulationConfig
    projection: FusedProjectionConfig | SplitProjectionConfig
    qkv: QkvConfig
    rotary: Any
    inner: Any
    out: LinearConfig

    def build(self) -> "SingleBlock":
        """The module, on the current default device."""
        return SingleBlock(self)


class SingleBlock(nn.Module):
    """Attention and feed-forward in parallel, modulated and gated."""

    def __init__(self, config: SingleBlockConfig):
        super().__init__()
        self.modulation = config.modulation.build()
        self.projection = config.projection.build()
        self.qkv = config.qkv.build()
        self.rotary = config.rotary.build()
        self.inner = config.inner.build()
        self.out = config.out.build()

    def forward(self, x_BTE: Tensor, conditioning_BPE: Tensor, rope: tuple[Tensor, ...], mask: AttentionMask) -> Tensor:
        """Maps the residual stream [B, T, E] to the next one; the other arguments as in `DoubleBlock.forward`."""
        shift, scale, gate = self.modulation(conditioning_BPE, mask.segment_ids_BT)
        projected, inner_BTF = self.projection(modulated_norm(x_BTE, shift, scale))
        q_BTND, k_BTND, v_BTND = self.qkv(projected)
        attended_BNTD = self.inner(self.rotary(q_BTND, *rope), self.rotary(k_BTND, *rope), v_BTND.transpose(1, 2), mask)
        both = (attended_BNTD.transpose(1, 2).flatten(2), F.gelu(inner_BTF, approximate="tanh"))
        return x_BTE + gate * self.out(torch.cat(both, dim=-1))
