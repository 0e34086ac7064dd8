"""The leaky model: a tree of component configurations, and the modules that it builds.

Shapes: B batch, T tokens, E model dim, F inner dim of the feed-forward, V vocabulary.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from leaky.config import LeakyConfig
from leaky.ops import leaky_sum
from titan.models.layers.cross_entropy import CrossEntropyConfig
from titan.models.layers.embedding import EmbeddingConfig
from titan.models.layers.linear import LinearConfig
from titan.models.layers.norm import RMSNormConfig


@dataclasses.dataclass(frozen=True)
class SquaredReluConfig:
    """Configuration of `SquaredRelu`: a node of its own, so that a kernel can take its place."""

    def build(self) -> "SquaredRelu":
        """The module, which has no parameters."""
        return SquaredRelu()


class SquaredRelu(nn.Module):
    """The square of the positive part."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., F] -> [..., F]."""
        return torch.relu(x).square()


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Configuration of `Block`; each attribute but the decay is the node of the child of that name."""

    norm: RMSNormConfig
    up: LinearConfig
    activation: Any
    down: LinearConfig
    slowest_decay: float

    def build(self) -> "Block":
        """The module, on the current default device."""
        return Block(self)


class Block(nn.Module):
    """Leaky sums of the normalised stream, through a feed-forward, added to the stream."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.slowest_decay = config.slowest_decay
        self.norm = config.norm.build()
        self.up = config.up.build()
        self.activation = config.activation.build()
        self.down = config.down.build()

    def forward(self, x_BTE: Tensor, is_start_BT: Tensor) -> Tensor:
        """[B, T, E] -> [B, T, E]."""
        decay_E = torch.linspace(0, self.slowest_decay, x_BTE.shape[-1], device=x_BTE.device)
        summed_BTE = leaky_sum(self.norm(x_BTE), decay_E, is_start_BT)
        return x_BTE + self.down(self.activation(self.up(summed_BTE)))


@dataclasses.dataclass(frozen=True)
class LeakyModelConfig:
    """Configuration of `LeakyModel`; each attribute is the node of the child of that name."""

    embedding: EmbeddingConfig
    layers: tuple[BlockConfig, ...]
    norm: RMSNormConfig
    head: LinearConfig
    loss: CrossEntropyConfig

    def build(self) -> "LeakyModel":
        """The model on the meta device."""
        with torch.device("meta"):
            return LeakyModel(self)


class LeakyModel(nn.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(self, config: LeakyModelConfig):
        super().__init__()
        self.embedding = config.embedding.build()
        self.layers = nn.ModuleList(layer.build() for layer in config.layers)
        self.norm = config.norm.build()
        self.head = config.head.build()
        self.cross_entropy = config.loss.build()

    def loss(self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor, segment_ids_BT: Tensor) -> Tensor:
        """The float32 sum of the cross-entropies of all labels but -100; arguments as in `batch_tensors`."""
        x_BTE = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTE = layer(x_BTE, positions_BT == 0)
        return self.cross_entropy(self.norm(x_BTE), self.head, labels_BT)


def leaky_components(config: LeakyConfig) -> LeakyModelConfig:
    """The component tree of a set of hyperparameters."""
    block = BlockConfig(
        norm=RMSNormConfig(config.dim, 1e-5),
        up=LinearConfig(config.dim, config.ffn_dim),
        activation=SquaredReluConfig(),
        down=LinearConfig(config.ffn_dim, config.dim),
        slowest_decay=config.slowest_decay,
    )
    return LeakyModelConfig(
        embedding=EmbeddingConfig(config.vocab_size, config.dim),
        layers=(block,) * config.num_layers,
        norm=RMSNormConfig(config.dim, 1e-5),
        head=LinearConfig(config.dim, config.vocab_size),
        loss=CrossEntropyConfig(),
    )
