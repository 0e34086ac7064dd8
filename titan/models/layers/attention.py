"""Grouped-query self-attention; the attention maths proper is a node of its own, so that it can be swapped.

Shapes: B batch, T tokens (queries), S tokens (keys), N query heads, K key/value heads, G = N / K query heads per
key/value head, D head dim, H half of it, E model dim, F = N D. Query head n belongs to key/value head n // G.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.models.layers.linear import LinearConfig
from titan.models.layers.rope import RotaryConfig


class AttentionMask(NamedTuple):
    """Which tokens see which, in two forms; an inner attention takes the one that suits it.

    Attributes:
      segment_ids_BT: integer document ids.
      allowed_BTS: bool, true where query t sees key s.
    """

    segment_ids_BT: Tensor
    allowed_BTS: Tensor

    def allowed_within(self, window: int) -> Tensor:
        """`allowed_BTS` without the pairs where query t is `window` or more after key s; 0: no window."""
        if not window:
            return self.allowed_BTS
        index_T = torch.arange(self.allowed_BTS.shape[1], device=self.allowed_BTS.device)
        return self.allowed_BTS & (index_T.unsqueeze(1) - index_T < window)


def causal_segment_mask(segment_ids_BT: Tensor) -> AttentionMask:
    """A token sees itself and the earlier tokens of its own segment. Built once per forward, shared by all layers.

    Padding (segment 0) is a segment like any other, so that no row of the mask is empty and nothing becomes NaN.
    """
    index_T = torch.arange(segment_ids_BT.shape[1], device=segment_ids_BT.device)
    causal_TS = index_T.unsqueeze(1) >= index_T
    return AttentionMask(segment_ids_BT, causal_TS & (segment_ids_BT.unsqueeze(2) == segment_ids_BT.unsqueeze(1)))


def segment_mask(segment_ids_BT: Tensor) -> AttentionMask:
    """A token sees all tokens of its own segment; padding (segment 0) is a segment like any other."""
    return AttentionMask(segment_ids_BT, segment_ids_BT.unsqueeze(2) == segment_ids_BT.unsqueeze(1))


@dataclasses.dataclass(frozen=True)
class CausalSegmentMaskConfig:
    """Configuration of `CausalSegmentMask`."""

    def build(self) -> "CausalSegmentMask":
        """The module, which has no parameters."""
        return CausalSegmentMask()


class CausalSegmentMask(nn.Module):
    """`causal_segment_mask` as a node that can be swapped."""

    def forward(self, segment_ids_BT: Tensor) -> AttentionMask:
        """The mask of a whole batch."""
        return causal_segment_mask(segment_ids_BT)


@dataclasses.dataclass(frozen=True)
class SegmentMaskConfig:
    """Configuration of `SegmentMask`."""

    def build(self) -> "SegmentMask":
        """The module, which has no parameters."""
        return SegmentMask()


class SegmentMask(nn.Module):
    """`segment_mask` as a node that can be swapped."""

    def forward(self, segment_ids_BT: Tensor) -> AttentionMask:
        """The mask of a whole batch."""
        return segment_mask(segment_ids_BT)


@dataclasses.dataclass(frozen=True)
class InnerAttentionConfig:
    """Base of the configurations of attention proper, by which kernels and parallelism find it in any model.

    The module that `build()` makes takes queries [B, N, T, D], keys and values [B, K, S, D], and a mask.

    Attributes:
      scale: factor of the scores; usually head_dim ** -0.5.
      window: a query sees itself and the window - 1 tokens before it; 0: all tokens before it.
      causal: whether the masks of this model are causal, for kernels that make the mask themselves.
    """

    scale: float
    window: int = 0
    causal: bool = True


@dataclasses.dataclass(frozen=True)
class MathAttentionConfig(InnerAttentionConfig):
    """Configuration of `MathAttention`."""

    def build(self) -> "MathAttention":
        """The module, which has no parameters."""
        return MathAttention(self)


class MathAttention(nn.Module):
    """Attention as explicit maths: the readable reference, and what a compiler sees in full.

    Keys and values are not repeated for the G query heads that share them: these are rows of one matrix product. The
    products have the inputs' dtype, softmax is float32.
    """

    def __init__(self, config: MathAttentionConfig):
        super().__init__()
        self.scale = config.scale
        self.window = config.window

    def forward(self, q_BNTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: AttentionMask) -> Tensor:
        """Attends from each query to the keys that `mask` and the window allow; returns [B, N, T, D] in q's dtype."""
        batch_size, num_heads, query_length, head_dim = q_BNTD.shape
        num_kv_heads, key_length = k_BKSD.shape[1:3]
        batch = batch_size * num_kv_heads
        rows = num_heads // num_kv_heads * query_length  # G and T as one dim
        q = (q_BNTD * self.scale).reshape(batch, rows, head_dim)
        k = k_BKSD.reshape(batch, key_length, head_dim)
        v = v_BKSD.reshape(batch, key_length, head_dim)
        scores_BNTS = torch.bmm(q, k.transpose(1, 2)).view(batch_size, num_heads, query_length, key_length)
        scores_BNTS = scores_BNTS.masked_fill(~mask.allowed_within(self.window).unsqueeze(1), float("-inf"))
        weights_BNTS = torch.softmax(scores_BNTS, dim=-1, dtype=torch.float32).to(v.dtype)
        return torch.bmm(weights_BNTS.view(batch, rows, key_length), v).view(q_BNTD.shape)


@dataclasses.dataclass(frozen=True)
class SdpaAttentionConfig(InnerAttentionConfig):
    """Configuration of `SdpaAttention`."""

    def build(self) -> "SdpaAttention":
        """The module, which has no parameters."""
        return SdpaAttention(self)


class SdpaAttention(nn.Module):
    """Attention by `torch.nn.functional.scaled_dot_product_attention`, with the mask that `MathAttention` takes."""

    def __init__(self, config: SdpaAttentionConfig):
        super().__init__()
        self.scale = config.scale
        self.window = config.window

    def forward(self, q_BNTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: AttentionMask) -> Tensor:
        """Attends from each query to the keys that `mask` and the window allow; returns [B, N, T, D] in q's dtype."""
        return F.scaled_dot_product_attention(
            q_BNTD,
            k_BKSD,
            v_BKSD,
            attn_mask=mask.allowed_within(self.window).unsqueeze(1),
            scale=self.scale,
            enable_gqa=q_BNTD.shape[1] != k_BKSD.shape[1],
        )


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Configuration of `Attention`.

    Attributes:
      head_dim: size of one head.
      wq: query projection, E to N D.
      wk: key projection, E to K D.
      wv: value projection, E to K D.
      wo: output projection, N D to E.
      inner: node whose module maps (q_BNTD, k_BKSD, v_BKSD, AttentionMask) to [B, N, T, D].
      q_norm: node whose module normalises each query head before it is rotated, [B, T, N, D] to the same; None: none.
      k_norm: the same for keys.
      rotary: node whose module maps (x_BTND, cos, sin) to rotated heads [B, N, T, D].
      o_gate: projection, E to N D, whose sigmoid multiplies what the inner attention gives; None: none.
    """

    head_dim: int
    wq: LinearConfig
    wk: LinearConfig
    wv: LinearConfig
    wo: LinearConfig
    inner: Any
    q_norm: Any | None = None
    k_norm: Any | None = None
    rotary: Any = RotaryConfig()
    o_gate: LinearConfig | None = None

    def build(self) -> "Attention":
        """The module, on the current default device."""
        return Attention(self)


class Attention(nn.Module):
    """Projections, norms and rotary embedding of queries and keys, inner attention, gate, output projection.

    Norms and gate are there if the configuration has them.
    """

    def __init__(self, config: AttentionConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = config.wq.build()
        self.wk = config.wk.build()
        self.wv = config.wv.build()
        self.wo = config.wo.build()
        self.q_norm = config.q_norm.build() if config.q_norm is not None else None
        self.k_norm = config.k_norm.build() if config.k_norm is not None else None
        self.rotary = config.rotary.build()
        self.o_gate = config.o_gate.build() if config.o_gate is not None else None
        self.inner = config.inner.build()

    def forward(self, x_BTE: Tensor, rope: tuple[Tensor, Tensor], mask: AttentionMask) -> Tensor:
        """Maps [B, T, E] to [B, T, E], given the cosines and sines of `Rope` and the mask of the whole batch."""
        q_BTND = self._split_heads(self.wq(x_BTE))
        k_BTKD = self._split_heads(self.wk(x_BTE))
        v_BKTD = self._split_heads(self.wv(x_BTE)).transpose(1, 2)
        if self.q_norm is not None:
            q_BTND = self.q_norm(q_BTND)
        if self.k_norm is not None:
            k_BTKD = self.k_norm(k_BTKD)
        out_BNTD = self.inner(self.rotary(q_BTND, *rope), self.rotary(k_BTKD, *rope), v_BKTD, mask)
        out_BTF = out_BNTD.transpose(1, 2).flatten(2)
        if self.o_gate is not None:
            out_BTF = out_BTF * torch.sigmoid(self.o_gate(x_BTE))
        return self.wo(out_BTF)

    def _split_heads(self, x: Tensor) -> Tensor:
        """[B, T, heads * D] to [B, T, heads, D], a view."""
        return x.view(*x.shape[:2], -1, self.head_dim)


INNER_ATTENTION: dict[str, type[InnerAttentionConfig]] = {"math": MathAttentionConfig, "sdpa": SdpaAttentionConfig}
"""What a family's field `attention` may name."""
