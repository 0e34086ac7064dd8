"""Llama 3 weights in and out of Hugging Face folders: safetensors shards, their index JSON, and config.json."""

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
from titan.models.llama3.config import Llama3Config

_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def config_from_hf(folder: str) -> Llama3Config:
    """The hyperparameters that a Hugging Face folder's config.json describes, as transformers 4 or 5 writes it.

    Raises:
      HfCheckpointError: the file is missing or damaged, or describes a model that is no Llama 3 (another model
        type, biases, another activation or RoPE scaling).
    """
    path, config = read_config(folder, "Llama 3", _FIXED)
    try:
        shared = shared_fields(config)
        head_dim = config.get("head_dim") or 0
        return Llama3Config(
            **shared,
            head_dim=0 if head_dim * shared["num_heads"] == shared["dim"] else head_dim,
            ffn_dim=config["intermediate_size"],
            **_rope_from_hf(path, config),
        )
    except KeyError as error:
        raise missing_key(path, error) from error


def _rope_from_hf(path: str, config: dict[str, Any]) -> dict[str, Any]:
    theta, kind, rope = rope_parameters(config)
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise HfCheckpointError(f"{path}: RoPE scaling {kind!r} is not supported", "give a model with 'llama3' or none")
    return {
        "rope_theta": theta,
        "rope_scaling": "llama3",
        "rope_scaling_factor": float(rope["factor"]),
        "rope_low_frequency_factor": float(rope["low_freq_factor"]),
        "rope_high_frequency_factor": float(rope["high_freq_factor"]),
        "rope_original_max_length": rope["original_max_position_embeddings"],
    }


def to_hf_config(config: Llama3Config) -> dict[str, Any]:
    """Content of config.json in the keys of transformers 4, which 5 reads as well."""
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_scaling_factor,
        "low_freq_factor": config.rope_low_frequency_factor,
        "high_freq_factor": config.rope_high_frequency_factor,
        "original_max_position_embeddings": config.rope_original_max_length,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        **_FIXED,
        **shared_hf_config(config),
        "head_dim": config.resolved_head_dim,
        "intermediate_size": config.ffn_dim,
        "rope_scaling": scaling if config.rope_scaling == "llama3" else None,
    }


HF = DecoderFormat(config_from_hf, to_hf_config)
"""Reads and writes the family's folders."""

load_hf, save_hf = HF.load_hf, HF.save_hf
