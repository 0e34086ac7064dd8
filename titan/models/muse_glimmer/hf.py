"""Muse Glimmer weights in and out of folders in Hugging Face's layout: safetensors shards, their index, config.json.

`transformers` has no class for the model: keys and names are those that it has for like things where there are such,
and titan's own otherwise. The rows of wq and wk lie as the model has them, in adjacent pairs.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from titan.models.hf.decoder import (
    load_decoder,
    missing_key,
    read_config,
    rope_parameters,
    save_decoder,
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


def load_hf(folder: str, model_config: MuseGlimmerConfig) -> dict[str, Tensor]:
    """Reads the weights of a folder that `save_hf` wrote, sharded or not.

    Args:
      folder: holds `model.safetensors.index.json` with its shards, or `model.safetensors`.
      model_config: the model that is to receive them (see `config_from_hf`).

    Returns:
      The state dict of the model, on the CPU, in the model's order and in the files' dtype.

    Raises:
      HfCheckpointError: a file is missing or damaged; a tensor is missing, unexpected, of a wrong shape, or
        quantised.
    """
    return load_decoder(folder, model_config)


def save_hf(
    state_dict: Mapping[str, Tensor], model_config: MuseGlimmerConfig, folder: str, *, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Writes weights as a folder that `load_hf` reads bit for bit.

    Args:
      state_dict: the model's state dict, complete, on any device, of any floating dtype.
      model_config: the model's configuration.
      folder: made if it does not exist; must not hold weights already, since stale shards would be taken for new ones.
      max_shard_bytes: a shard is closed before it grows beyond this; a single larger tensor has a shard of its own.

    Raises:
      HfCheckpointError: the folder holds weights, or a tensor is missing, unexpected or of a wrong shape.
    """
    save_decoder(state_dict, model_config, to_hf_config(model_config), folder, max_shard_bytes=max_shard_bytes)


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
