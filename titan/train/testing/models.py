"""Configurations of small models for tests: every family, in the sizes that the claims need."""

import dataclasses
import functools
from typing import Any

from titan.models.flux.config import FluxConfig
from titan.models.llama3.config import Llama3Config
from titan.models.muse_glimmer.config import MuseGlimmerConfig
from titan.models.qwen3.config import Qwen3Config, Qwen3MoeConfig
from titan.train.config.kernels import GroupedMatmulConfig, RopeKernelConfig, SplashAttentionKernelConfig
from titan.train.config.run import Config

BATCH, LENGTH = 8, 16
DIM, FFN_DIM, NUM_LAYERS = 32, 48, 3

_SIZES = {"vocab_size": 100, "dim": DIM, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


_MIXTURE = Qwen3MoeConfig(**_SIZES, num_layers=2, num_experts=8, num_active_experts=2, expert_ffn_dim=24)

# With heads for four devices to share.
_SHARED = {**_SIZES, "num_heads": 8, "num_kv_heads": 4, "num_layers": 2}

# With fewer heads of keys and values than four devices.
_FEW = {**_SHARED, "num_kv_heads": 2}

# Of the 16 tokens of a row 6 are for the texts of its two images.
FLUX = FluxConfig(
    dim=DIM,
    num_double_blocks=2,
    num_single_blocks=2,
    num_heads=2,
    rope_dims=(4, 6, 6),
    in_channels=8,
    text_dim=12,
    pooled_dim=10,
    guidance_embedding=True,
    text_length=3,
    images_per_row=2,
)
# With heads for four devices to share.
_FLUX_SHARED = dataclasses.replace(FLUX, num_heads=4, rope_dims=(2, 2, 4))


KERNELS = {
    "splash_attention_kernel": SplashAttentionKernelConfig(enable=True),
    "rope_kernel": RopeKernelConfig(enable=True),
}

CONFIGS = {
    "llama3": Config(model=Llama3Config(**_SIZES, ffn_dim=FFN_DIM, num_layers=NUM_LAYERS)),
    # Of its dims, an axis of 8 divides only that of the heads, and of none a norm's.
    "llama3_uneven": Config(model=Llama3Config(**{**_SIZES, "dim": 36}, ffn_dim=100, num_layers=2)),
    "llama3_deep": Config(model=Llama3Config(**_SIZES, ffn_dim=FFN_DIM, num_layers=4 * NUM_LAYERS)),
    "llama3_shared": Config(model=Llama3Config(**_SHARED, ffn_dim=FFN_DIM)),
    "qwen3": Config(model=Qwen3Config(**_SIZES, ffn_dim=FFN_DIM, num_layers=NUM_LAYERS, tie_embeddings=True)),
    "qwen3_shared": Config(model=Qwen3Config(**_SHARED, ffn_dim=FFN_DIM, tie_embeddings=True, attention="sdpa")),
    "qwen3_moe": Config(model=_MIXTURE),
    "qwen3_moe_grouped": Config(model=_MIXTURE, grouped_matmul=GroupedMatmulConfig(enable=True, paired=True)),
    "qwen3_moe_dropping": Config(model=dataclasses.replace(_MIXTURE, capacity_factor=1.0)),
    # Experts in a number that four devices do not divide.
    "qwen3_moe_shared": Config(model=Qwen3MoeConfig(**_SHARED, num_experts=6, num_active_experts=2, expert_ffn_dim=24)),
    # The window is shorter than a document. Over four devices it is longer than a chunk of a sequence.
    "muse_glimmer_shared": Config(
        model=MuseGlimmerConfig(**_SHARED, ffn_dim=FFN_DIM, window=3, global_interval=2, logit_scale=3.0)
    ),
    # 6 experts and 3 are divided by 2 and by nothing, so that of stacked weights either dim 0 or dim 1 is sharded.
    "qwen3_tied": Config(model=Qwen3Config(**_SIZES, ffn_dim=FFN_DIM, num_layers=1, tie_embeddings=True)),
    "qwen3_moe_six": Config(model=dataclasses.replace(_MIXTURE, num_layers=1, num_experts=6)),
    "qwen3_moe_three": Config(model=dataclasses.replace(_MIXTURE, num_layers=1, num_experts=3)),
    # The window is shorter than a document.
    "muse_glimmer": Config(
        model=MuseGlimmerConfig(**_SIZES, num_layers=2, ffn_dim=FFN_DIM, window=4, global_interval=2, logit_scale=3.0)
    ),
    "qwen3_few": Config(model=Qwen3Config(**_FEW, ffn_dim=FFN_DIM)),
    "qwen3_moe_few": Config(model=Qwen3MoeConfig(**_FEW, num_experts=6, num_active_experts=2, expert_ffn_dim=24)),
    "muse_glimmer_few": Config(
        model=MuseGlimmerConfig(**_FEW, ffn_dim=FFN_DIM, window=3, global_interval=2, logit_scale=3.0)
    ),
    "flux": Config(model=FLUX),
    "flux_shared": Config(model=_FLUX_SHARED),
    "flux_fused": Config(
        model=dataclasses.replace(_FLUX_SHARED, split_projection=False, rope="matrix", qkv_unpack="permute")
    ),
    "flux_kernels": Config(model=FLUX, **KERNELS),
    "flux_release": Config(model=dataclasses.replace(FLUX, rope="matrix", qkv_unpack="permute", attention="sdpa")),
}


@functools.cache
def model_components(model: str) -> Any:
    """The component tree of a model, before any swap."""
    return _patterned() if model == "pattern" else CONFIGS[model].model.components()


def _patterned() -> Any:
    """A wide and a narrow layer in turn, twice, and a wide one alone."""
    wide = Llama3Config(**_SIZES, ffn_dim=FFN_DIM, num_layers=5).components()
    narrow = Llama3Config(**_SIZES, ffn_dim=FFN_DIM // 2, num_layers=5, attention="sdpa").components()
    layers = tuple((narrow if index % 2 else wide).layers[index] for index in range(5))
    return dataclasses.replace(wide, layers=layers)
