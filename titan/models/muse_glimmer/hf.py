"""Muse Glimmer weights in and out of folders in Hugging Face's layout: safetensors shards, their index, config.json.

`transformers` has no class for the model: keys and names are those that it has for like things where there are such,
and titan's own otherwise. The rows of wq and wk lie as the model has them, in adjacent pairs.
"""

from typing import Any

from titan.models.hf.decoder import (
    DecoderFormat,
    missing_key,
    read_config,
    rope_parameters,
    shared_fields,
    shared_hf_config,
)
from titan.models.hf.folder import HfCheckpointError
from titan.models.muse_glimmer.config import MuseGlimmerConfig

_FIXED = {
    "model_type": "muse_glimmer",
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_interleave": True,
    "tie_word_embeddings": False,
}
# Keys of config.json by the field that they hold.
_KEYS = {
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "window": "sliding_window",
    "global_interval": "sliding_window_pattern",
    "query_scale": "query_scale",
    "post_norm_eps": "post_norm_eps",
    "logit_scale": "logit_scale",
    "logit_soft_cap": "final_logit_softcapping",
}


def config_from_hf(folder: str) -> MuseGlimmerConfig:
    """The hyperparameters that a folder's config.json describes.

    Raises:
      HfCheckpointError: the file is missing or damaged, or describes another model (another model type, biases, tied
        embeddings, another activation, RoPE in halves or with scaling).
    """
    path, config = read_config(folder, "Muse Glimmer", _FIXED)
    theta, kind, _ = rope_parameters(config)
    if kind != "default":
        raise HfCheckpointError(f"{path}: RoPE scaling {kind!r} is not supported; give a model without")
    try:
        shared = shared_fields(config)
        del shared["tie_embeddings"]
        own = {field: config[key] for field, key in _KEYS.items()}
        return MuseGlimmerConfig(**shared, **own, rope_theta=theta)
    except KeyError as error:
        raise missing_key(path, error) from error


def to_hf_config(config: MuseGlimmerConfig) -> dict[str, Any]:
    """Content of config.json, without the dtype."""
    own = {key: getattr(config, field) for field, key in _KEYS.items()}
    return {"architectures": ["MuseGlimmerForCausalLM"], **shared_hf_config(config), **_FIXED, **own}


HF = DecoderFormat(config_from_hf, to_hf_config)
"""Reads and writes the family's folders."""

load_hf, save_hf = HF.load_hf, HF.save_hf
