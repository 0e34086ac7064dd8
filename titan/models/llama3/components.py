"""From hyperparameters to the component tree of Llama 3, with the sizes and the initialiser of every single module."""

from titan.core.init import Normal, TruncatedNormal
from titan.models.layers.attention import INNER_ATTENTION, AttentionConfig
from titan.models.layers.cross_entropy import CrossEntropyConfig
from titan.models.layers.decoder import DecoderConfig, TransformerBlockConfig
from titan.models.layers.embedding import EmbeddingConfig
from titan.models.layers.feed_forward import FeedForwardConfig
from titan.models.layers.linear import LinearConfig
from titan.models.layers.norm import RMSNormConfig
from titan.models.layers.rope import Llama3RopeScaling, RopeConfig
from titan.models.llama3.config import Llama3Config


def llama3_components(config: Llama3Config) -> DecoderConfig:
    """The component tree that the hyperparameters describe.

    Weights begin as a normal of 0.02 cut at 3 standard deviations; the projections that write to the residual stream
    (wo, w2) of layer i have 0.02 / sqrt(2 (i + 1)) instead, the head dim ** -0.5, the embedding is N(0, 1). A tied
    embedding begins as the head does: as N(0, 1) its logits would have a standard deviation of sqrt(dim).
    """
    head_init = TruncatedNormal(config.dim**-0.5)
    return DecoderConfig(
        embedding=EmbeddingConfig(config.vocab_size, config.dim, head_init if config.tie_embeddings else Normal(1.0)),
        rope=RopeConfig(config.resolved_head_dim, config.rope_theta, _rope_scaling(config)),
        layers=tuple(_layer(config, index) for index in range(config.num_layers)),
        norm=RMSNormConfig(config.dim, config.norm_eps),
        head=None if config.tie_embeddings else LinearConfig(config.dim, config.vocab_size, head_init),
        loss=CrossEntropyConfig(),
    )


def _layer(config: Llama3Config, index: int) -> TransformerBlockConfig:
    head_dim = config.resolved_head_dim
    q_dim, kv_dim = config.num_heads * head_dim, config.num_kv_heads * head_dim
    residual_init = TruncatedNormal(0.02 / (2 * (index + 1)) ** 0.5)
    return TransformerBlockConfig(
        attention_norm=RMSNormConfig(config.dim, config.norm_eps),
        attention=AttentionConfig(
            head_dim=head_dim,
            wq=LinearConfig(config.dim, q_dim),
            wk=LinearConfig(config.dim, kv_dim),
            wv=LinearConfig(config.dim, kv_dim),
            wo=LinearConfig(q_dim, config.dim, residual_init),
            inner=INNER_ATTENTION[config.attention](head_dim**-0.5),
        ),
        feed_forward_norm=RMSNormConfig(config.dim, config.norm_eps),
        feed_forward=FeedForwardConfig(
            w1=LinearConfig(config.dim, config.ffn_dim),
            w2=LinearConfig(config.ffn_dim, config.dim, residual_init),
            w3=LinearConfig(config.dim, config.ffn_dim),
        ),
    )


def _rope_scaling(config: Llama3Config) -> Llama3RopeScaling | None:
    if config.rope_scaling == "none":
        return None
    return Llama3RopeScaling(
        factor=config.rope_scaling_factor,
        low_frequency_factor=config.rope_low_frequency_factor,
        high_frequency_factor=config.rope_high_frequency_factor,
        original_max_length=config.rope_original_max_length,
    )
