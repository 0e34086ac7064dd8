"""From hyperparameters to the component tree of Muse Glimmer, with the size and the initialiser of every module."""

import functools

from titan.core.init import Normal, Zeros
from titan.models.layers.attention import INNER_ATTENTION, AttentionConfig
from titan.models.layers.cross_entropy import CrossEntropyConfig
from titan.models.layers.decoder import DecoderConfig, TransformerBlockConfig
from titan.models.layers.embedding import EmbeddingConfig
from titan.models.layers.feed_forward import FeedForwardConfig
from titan.models.layers.head import SoftCappedHeadConfig
from titan.models.layers.linear import LinearConfig
from titan.models.layers.norm import RMSNormConfig, UnscaledRMSNormConfig
from titan.models.layers.rope import NoRotaryConfig, RopeConfig, RotaryConfig
from titan.models.muse_glimmer.config import MuseGlimmerConfig

_INIT = Normal(0.02)  # of every matrix
_linear = functools.partial(LinearConfig, weight_init=_INIT)


def muse_glimmer_components(config: MuseGlimmerConfig) -> DecoderConfig:
    """The component tree that the hyperparameters describe.

    Three layers with a window and RoPE alternate with one that has neither. Queries and keys pass an RMSNorm without
    scale, and the factor of queries stands in the scale of the scores, which is the same product rounded less often. A
    sigmoid gate multiplies what attention gives. Norms stand before and after each sub-block, with weights that begin
    at 0 around a centre of 1; the final norm has the centre 0, so that all logits begin at exactly 0. All matrices
    begin as N(0, 0.02).
    """
    return DecoderConfig(
        embedding=EmbeddingConfig(config.vocab_size, config.dim, _INIT),
        rope=RopeConfig(config.head_dim, config.rope_theta),
        layers=tuple(_layer(config, config.is_global(index)) for index in range(config.num_layers)),
        norm=RMSNormConfig(config.dim, config.norm_eps, Zeros()),
        head=SoftCappedHeadConfig(
            config.dim, config.vocab_size, config.logit_scale, config.logit_soft_cap, weight_init=_INIT
        ),
        loss=CrossEntropyConfig(),
        embedding_norm=UnscaledRMSNormConfig(config.norm_eps),
    )


def _layer(config: MuseGlimmerConfig, is_global: bool) -> TransformerBlockConfig:
    q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norm = RMSNormConfig(config.dim, config.norm_eps, Zeros(), centre=1.0)
    post_norm = RMSNormConfig(config.dim, config.post_norm_eps, Zeros(), centre=1.0)
    return TransformerBlockConfig(
        attention_norm=norm,
        attention=AttentionConfig(
            head_dim=config.head_dim,
            wq=_linear(config.dim, q_dim),
            wk=_linear(config.dim, kv_dim),
            wv=_linear(config.dim, kv_dim),
            wo=_linear(q_dim, config.dim),
            inner=INNER_ATTENTION[config.attention](
                config.query_scale * config.head_dim**-0.5, window=0 if is_global else config.window
            ),
            q_norm=UnscaledRMSNormConfig(config.norm_eps),
            k_norm=UnscaledRMSNormConfig(config.norm_eps),
            rotary=NoRotaryConfig() if is_global else RotaryConfig(adjacent_pairs=True),
            o_gate=_linear(config.dim, q_dim),
        ),
        feed_forward_norm=norm,
        feed_forward=FeedForwardConfig(
            w1=_linear(config.dim, config.ffn_dim),
            w2=_linear(config.ffn_dim, config.dim),
            w3=_linear(config.dim, config.ffn_dim),
        ),
        attention_post_norm=post_norm,
        feed_forward_post_norm=post_norm,
    )
