"""Pre-norm decoder shared by the families of language models: component configurations, and the modules they build.

Families differ in what the nodes are (normalised queries and keys, a mixture of experts) and in their sizes, not in how
these are put together. A node's fields carry the names of its module's children, so that a path in the tree
(`layers.3.attention.wq`) is the fully qualified name of the module (the node `loss` alone has another,
`cross_entropy`: `loss` is a method). Nothing here knows about devices, sharding, precision policies or kernels.

Shapes: B batch, T tokens, E model dim, V vocabulary, L mixtures of experts, X experts.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titan.models.layers.attention import AttentionConfig, AttentionMask, CausalSegmentMaskConfig
from titan.models.layers.cross_entropy import CrossEntropyConfig
from titan.models.layers.embedding import EmbeddingConfig
from titan.models.layers.head import SoftCappedHeadConfig
from titan.models.layers.linear import LinearConfig
from titan.models.layers.moe import MoE
from titan.models.layers.norm import RMSNormConfig
from titan.models.layers.rope import RopeConfig
from titan.models.layers.routing_tally import RoutingTally


class RoutedStream(NamedTuple):
    """What goes from layer to layer where the routing of mixtures is counted.

    Attributes:
      x_BTE: the residual stream.
      tally: of the mixtures so far.
    """

    x_BTE: Tensor
    tally: RoutingTally


@dataclasses.dataclass(frozen=True)
class TransformerBlockConfig:
    """Configuration of `TransformerBlock`; each attribute is the node of the child of that name.

    Attributes:
      attention_norm: normalises what attention reads.
      attention: self-attention.
      feed_forward_norm: normalises what the feed-forward reads.
      feed_forward: node whose module maps [B, T, E] to [B, T, E], token by token: `FeedForwardConfig`, `MoEConfig`.
      attention_post_norm: normalises what attention adds to the residual stream; None: none.
      feed_forward_post_norm: normalises what the feed-forward adds; None: none.
    """

    attention_norm: RMSNormConfig
    attention: AttentionConfig
    feed_forward_norm: RMSNormConfig
    feed_forward: Any
    attention_post_norm: RMSNormConfig | None = None
    feed_forward_post_norm: RMSNormConfig | None = None

    def build(self) -> "TransformerBlock":
        """The module, on the current default device."""
        return TransformerBlock(self)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream and added to it."""

    def __init__(self, config: TransformerBlockConfig):
        super().__init__()
        self.attention_norm = config.attention_norm.build()
        self.attention = config.attention.build()
        self.feed_forward_norm = config.feed_forward_norm.build()
        self.feed_forward = config.feed_forward.build()
        self.attention_post_norm = _built(config.attention_post_norm)
        self.feed_forward_post_norm = _built(config.feed_forward_post_norm)

    def forward(
        self,
        stream: Tensor | RoutedStream,
        rope: tuple[Tensor, Tensor],
        mask: AttentionMask,
        expert_bias_LX: Tensor | None = None,
    ) -> Tensor | RoutedStream:
        """Maps the residual stream [B, T, E], alone or with a tally, to the next one; the rest is the whole model's."""
        x_BTE, tally = stream if isinstance(stream, RoutedStream) else (stream, None)
        attended_BTE = self.attention(self.attention_norm(x_BTE), rope, mask)
        if self.attention_post_norm is not None:
            attended_BTE = self.attention_post_norm(attended_BTE)
        x_BTE = x_BTE + attended_BTE
        fed_BTE = self.feed_forward_norm(x_BTE)
        if tally is not None and isinstance(self.feed_forward, MoE):
            fed_BTE, tally = self.feed_forward(fed_BTE, tally, expert_bias_LX)
        else:
            fed_BTE = self.feed_forward(fed_BTE)
        if self.feed_forward_post_norm is not None:
            fed_BTE = self.feed_forward_post_norm(fed_BTE)
        x_BTE = x_BTE + fed_BTE
        return x_BTE if tally is None else RoutedStream(x_BTE, tally)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Configuration of `Decoder`, fully spelled out; made by a family's `components()`, then open to rewriting.

    Attributes:
      embedding: the token embedding.
      rope: the rotary embedding that all layers share.
      layers: one node per transformer block.
      norm: the final norm.
      head: the projection to logits; None where the embedding's table is the head too.
      loss: node whose module maps (hidden_BTE, head, labels_BT) to the summed loss.
      embedding_norm: node whose module normalises the embedding's output, [B, T, E] to the same; None: none.
      mask: node whose module maps segment_ids_BT to the mask that all layers share.
    """

    embedding: EmbeddingConfig
    rope: RopeConfig
    layers: tuple[TransformerBlockConfig, ...]
    norm: RMSNormConfig
    head: LinearConfig | SoftCappedHeadConfig | None
    loss: CrossEntropyConfig
    embedding_norm: Any | None = None
    mask: Any = CausalSegmentMaskConfig()

    def build(self) -> "Decoder":
        """The model on the meta device, parameters float32, each with its initialiser in `param_init`."""
        with torch.device("meta"):
            return Decoder(self)


class Decoder(nn.Module):
    """Embedding, transformer blocks, final norm and head.

    It has no buffers, and every constant is computed in `forward` from the shapes and the positions, so that parameters
    are all there is to materialise. With tied embeddings `head` is None and the head is `embedding.weight`.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.embedding = config.embedding.build()
        self.rope = config.rope.build()
        self.layers = nn.ModuleList(layer.build() for layer in config.layers)
        self.norm = config.norm.build()
        self.head = _built(config.head)
        self.cross_entropy = config.loss.build()
        self.embedding_norm = _built(config.embedding_norm)
        self.mask = config.mask.build()

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, segment_ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V] in the head's dtype.

        Args:
          tokens_BT: integer token ids.
          positions_BT: integer position of each token within its document.
          segment_ids_BT: integer document of each token; 0 is padding. A token sees only its own document's.
        """
        return self._project(self.hidden(tokens_BT, positions_BT, segment_ids_BT))

    def loss(self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor, segment_ids_BT: Tensor) -> Tensor:
        """The float32 scalar sum of the cross-entropies of all labels but -100; the other arguments as in `forward`."""
        return self.cross_entropy(self.hidden(tokens_BT, positions_BT, segment_ids_BT), self._project, labels_BT)

    def routed_loss(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        segment_ids_BT: Tensor,
        tally: RoutingTally,
        expert_bias_LX: Tensor | None = None,
    ) -> tuple[Tensor, RoutingTally]:
        """The same loss, and what the routers did.

        Args:
          tally: the start of one.
          expert_bias_LX: float32, added to the scores of each mixture's experts for the choice of experts alone.
        """
        embedded = RoutedStream(self._embed(tokens_BT), tally)
        shared = () if expert_bias_LX is None else (expert_bias_LX,)
        stream = self._layers(embedded, positions_BT, segment_ids_BT, *shared)
        return self.cross_entropy(self.norm(stream.x_BTE), self._project, labels_BT), stream.tally

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor, segment_ids_BT: Tensor) -> Tensor:
        """What the head reads, [B, T, E]: the normalised residual stream after the last block."""
        return self.norm(self._layers(self._embed(tokens_BT), positions_BT, segment_ids_BT))

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        x_BTE = self.embedding(tokens_BT)
        return x_BTE if self.embedding_norm is None else self.embedding_norm(x_BTE)

    def _layers(self, stream: Any, positions_BT: Tensor, segment_ids_BT: Tensor, *shared: Tensor) -> Any:
        rope = self.rope(positions_BT)
        mask = self.mask(segment_ids_BT)
        for layer in self.layers:
            stream = layer(stream, rope, mask, *shared)
        return stream

    @property
    def _project(self):
        return self.head if self.head is not None else self.embedding.project


def _built(node: Any | None) -> nn.Module | None:
    return node.build() if node is not None else None
