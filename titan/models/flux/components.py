"""From hyperparameters to the component tree of FLUX.1, with the size and the initialiser of every single module."""

from titan.core.init import Initializer, Normal, Uniform, Zeros
from titan.models.flux.config import MLP_RATIO, SINUSOID_DIM, FluxConfig
from titan.models.flux.double_block import DoubleBlockConfig, StreamConfig
from titan.models.flux.embedders import EmbedderConfig
from titan.models.flux.feed_forward import GeluFeedForwardConfig
from titan.models.flux.flow_loss import FlowLossConfig
from titan.models.flux.modulation import ModulationConfig
from titan.models.flux.qkv import QkvConfig
from titan.models.flux.rope import FluxRopeConfig, MatrixRotaryConfig
from titan.models.flux.single_block import FusedProjectionConfig, SingleBlockConfig, SplitProjectionConfig
from titan.models.flux.transformer import FluxTransformerConfig
from titan.models.layers.attention import INNER_ATTENTION, InnerAttentionConfig, SegmentMaskConfig
from titan.models.layers.image_times import ImageTimesConfig
from titan.models.layers.linear import LinearConfig
from titan.models.layers.norm import RMSNormConfig
from titan.models.layers.rope import RotaryConfig

_EPS = 1e-6


def flux_components(config: FluxConfig) -> FluxTransformerConfig:
    """The component tree that the hyperparameters describe.

    Weights begin as in torchtitan's training of FLUX: uniform by Glorot and Bengio (2010) with biases of 0; the
    embedders of time, text and guidance as N(0, 0.02); all modulations, and the head, at exactly 0, so that every block
    begins as the identity and every prediction at 0. The fan-out of a fused projection is that of the fused matrix,
    whether or not it is split, so that the flag leaves the distribution as it is.
    """
    dim = config.dim
    return FluxTransformerConfig(
        image_in=_linear(config.in_channels, dim),
        text_in=_linear(config.text_dim, dim),
        time_in=_embedder(SINUSOID_DIM, dim),
        pooled_in=_embedder(config.pooled_dim, dim),
        guidance_in=_embedder(SINUSOID_DIM, dim) if config.guidance_embedding else None,
        rope=FluxRopeConfig(config.rope_dims, matrices=config.rope == "matrix"),
        mask=SegmentMaskConfig(),
        image_times=ImageTimesConfig(),
        double_blocks=(_double_block(config),) * config.num_double_blocks,
        single_blocks=(_single_block(config),) * config.num_single_blocks,
        final_modulation=_modulation(dim, 2),
        head=_linear(dim, config.in_channels, Zeros()),
        loss=FlowLossConfig(),
    )


def _double_block(config: FluxConfig) -> DoubleBlockConfig:
    dim, inner_dim = config.dim, MLP_RATIO * config.dim
    stream = StreamConfig(
        modulation=_modulation(dim, 6),
        projection=_linear(dim, 3 * dim),
        qkv=_qkv(config),
        out=_linear(dim, dim),
        feed_forward=GeluFeedForwardConfig(_linear(dim, inner_dim), _linear(inner_dim, dim)),
    )
    return DoubleBlockConfig(text=stream, image=stream, rotary=_rotary(config), inner=_inner(config))


def _single_block(config: FluxConfig) -> SingleBlockConfig:
    dim, inner_dim = config.dim, MLP_RATIO * config.dim
    init = _glorot(dim, 3 * dim + inner_dim)
    return SingleBlockConfig(
        modulation=_modulation(dim, 3),
        projection=SplitProjectionConfig(_linear(dim, 3 * dim, init), _linear(dim, inner_dim, init))
        if config.split_projection
        else FusedProjectionConfig(_linear(dim, 3 * dim + inner_dim, init), 3 * dim),
        qkv=_qkv(config),
        rotary=_rotary(config),
        inner=_inner(config),
        out=_linear(dim + inner_dim, dim),
    )


def _qkv(config: FluxConfig) -> QkvConfig:
    norm = RMSNormConfig(config.head_dim, _EPS)
    return QkvConfig(norm, norm, by_view=config.qkv_unpack == "view")


def _rotary(config: FluxConfig) -> RotaryConfig | MatrixRotaryConfig:
    return MatrixRotaryConfig() if config.rope == "matrix" else RotaryConfig(adjacent_pairs=True)


def _inner(config: FluxConfig) -> InnerAttentionConfig:
    return INNER_ATTENTION[config.attention](config.head_dim**-0.5, causal=False)


def _modulation(dim: int, num_vectors: int) -> ModulationConfig:
    return ModulationConfig(_linear(dim, num_vectors * dim, Zeros()), num_vectors)


def _embedder(in_dim: int, dim: int) -> EmbedderConfig:
    return EmbedderConfig(_linear(in_dim, dim, Normal(0.02)), _linear(dim, dim, Normal(0.02)))


def _linear(in_dim: int, out_dim: int, weight_init: Initializer | None = None) -> LinearConfig:
    return LinearConfig(in_dim, out_dim, weight_init or _glorot(in_dim, out_dim), bias_init=Zeros())


def _glorot(in_dim: int, out_dim: int) -> Uniform:
    return Uniform((6.0 / (in_dim + out_dim)) ** 0.5)
