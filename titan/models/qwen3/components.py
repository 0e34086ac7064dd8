"""From hyperparameters to the component tree of Qwen3, with the sizes and the initialiser of every single module."""

import functools

from titan.core.init import Normal
from titan.models.layers.attention import INNER_ATTENTION, AttentionConfig
from titan.models.layers.cross_entropy import CrossEntropyConfig
from titan.models.layers.decoder import DecoderConfig, TransformerBlockConfig
from titan.models.layers.embedding import EmbeddingConfig
from titan.models.layers.experts import LoopExpertsConfig
from titan.models.layers.feed_forward import FeedForwardConfig
from titan.models.layers.linear import LinearConfig
from titan.models.layers.moe import MoEConfig
from titan.models.layers.norm import RMSNormConfig
from titan.models.layers.rope import RopeConfig
from titan.models.layers.router import RouterConfig
from titan.models.qwen3.config import Qwen3CommonConfig, Qwen3Config, Qwen3MoeConfig

_INIT = Normal(0.02)  # of every matrix
_linear = functools.partial(LinearConfig, weight_init=_INIT)


def qwen3_components(config: Qwen3CommonConfig) -> DecoderConfig:
    """The component tree that the hyperparameters describe (Yang et al., 2025, arXiv:2505.09388).

    A Llama without scaling of RoPE, whose queries and keys pass an RMSNorm over each head before they are rotated, and
    whose feed-forward may be a mixture of experts. All matrices begin as N(0, 0.02).
    """
    return DecoderConfig(
        embedding=EmbeddingConfig(config.vocab_size, config.dim, _INIT),
        rope=RopeConfig(config.head_dim, config.rope_theta),
        layers=(_layer(config),) * config.num_layers,
        norm=RMSNormConfig(config.dim, config.norm_eps),
        head=None if config.tie_embeddings else _linear(config.dim, config.vocab_size),
        loss=CrossEntropyConfig(),
    )


def _layer(config: Qwen3CommonConfig) -> TransformerBlockConfig:
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return TransformerBlockConfig(
        attention_norm=RMSNormConfig(config.dim, config.norm_eps),
        attention=AttentionConfig(
            head_dim=config.head_dim,
            wq=_linear(config.dim, q_dim),
            wk=_linear(config.dim, kv_dim),
            wv=_linear(config.dim, kv_dim),
            wo=_linear(q_dim, config.dim),
            inner=INNER_ATTENTION[config.attention](config.head_dim**-0.5),
            q_norm=RMSNormConfig(config.head_dim, config.norm_eps),
            k_norm=RMSNormConfig(config.head_dim, config.norm_eps),
        ),
        feed_forward_norm=RMSNormConfig(config.dim, config.norm_eps),
        feed_forward=_feed_forward(config),
    )


@functools.singledispatch
def _feed_forward(config: Qwen3CommonConfig) -> FeedForwardConfig | MoEConfig:
    raise TypeError(f"{type(config).__qualname__} does not say what its feed-forward is")


@_feed_forward.register
def _(config: Qwen3Config) -> FeedForwardConfig:
    return FeedForwardConfig(
        w1=_linear(config.dim, config.ffn_dim),
        w2=_linear(config.ffn_dim, config.dim),
        w3=_linear(config.dim, config.ffn_dim),
    )


@_feed_forward.register
def _(config: Qwen3MoeConfig) -> MoEConfig:
    return MoEConfig(
        router=RouterConfig(
            dim=config.dim,
            num_experts=config.num_experts,
            num_active_experts=config.num_active_experts,
            normalize_weights=config.normalize_expert_weights,
            weight_init=_INIT,
        ),
        experts=LoopExpertsConfig(config.num_experts, config.dim, config.expert_ffn_dim, _INIT),
        capacity_factor=config.capacity_factor,
    )
