"""Qwen3 weights, dense and mixture of experts, in and out of Hugging Face folders."""

import functools
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
from titan.models.qwen3.config import Qwen3CommonConfig, Qwen3Config, Qwen3MoeConfig

_FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
_FIXED_MOE = {**_FIXED, "decoder_sparse_step": 1}  # every layer is a mixture; dense models lack the key
_MODEL_TYPES = ("qwen3", "qwen3_moe")


def config_from_hf(folder: str) -> Qwen3CommonConfig:
    """The hyperparameters that a Hugging Face folder's config.json describes, as transformers 4 or 5 writes it.

    Raises:
      HfCheckpointError: the file is missing or damaged, or describes a model that is no Qwen3 (another model type,
        biases, a sliding window, another activation, RoPE scaling), or a mixture in which some layers are dense.
    """
    path, config = read_config(folder, "Qwen3", _FIXED_MOE)
    if config.get("model_type") not in _MODEL_TYPES:
        raise HfCheckpointError(
            f"{path}: model_type is {config.get('model_type')!r}, a Qwen3 has {' or '.join(map(repr, _MODEL_TYPES))}; "
            "give a Qwen3 folder"
        )
    try:
        shared = {**shared_fields(config), "head_dim": config["head_dim"], "rope_theta": _rope_theta(path, config)}
        if config["model_type"] == "qwen3":
            return Qwen3Config(**shared, ffn_dim=config["intermediate_size"])
        if config.get("mlp_only_layers"):
            raise HfCheckpointError(
                f"{path}: mlp_only_layers is {config['mlp_only_layers']}, and dense layers within a mixture are not "
                "supported; give a model without them"
            )
        return Qwen3MoeConfig(
            **shared,
            # The same number under the name of transformers 4 or 5.
            num_experts=config["num_local_experts" if "num_local_experts" in config else "num_experts"],
            num_active_experts=config["num_experts_per_tok"],
            expert_ffn_dim=config["moe_intermediate_size"],
            normalize_expert_weights=bool(config.get("norm_topk_prob", False)),
        )
    except KeyError as error:
        raise missing_key(path, error) from error


def _rope_theta(path: str, config: dict[str, Any]) -> float:
    theta, kind, _ = rope_parameters(config)
    if kind != "default":
        raise HfCheckpointError(f"{path}: RoPE scaling {kind!r} is not supported; give a model without")
    return theta


@functools.singledispatch
def to_hf_config(config: Qwen3CommonConfig) -> dict[str, Any]:
    """Content of config.json in the keys of transformers 4, which 5 reads as well."""
    raise TypeError(f"{type(config).__qualname__} has no counterpart in Hugging Face's format")


@to_hf_config.register
def _(config: Qwen3Config) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_FIXED,
        **shared_hf_config(config),
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
    }


@to_hf_config.register
def _(config: Qwen3MoeConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_FIXED_MOE,
        **shared_hf_config(config),
        "head_dim": config.head_dim,
        # That of the dense layers, of which there are none; the published files have this product.
        "intermediate_size": config.num_active_experts * config.expert_ffn_dim,
        "mlp_only_layers": [],
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_active_experts,
        "moe_intermediate_size": config.expert_ffn_dim,
        "norm_topk_prob": config.normalize_expert_weights,
    }


HF = DecoderFormat(config_from_hf, to_hf_config)
"""Reads and writes the family's folders."""

load_hf, save_hf = HF.load_hf, HF.save_hf
