"""Decoders in Hugging Face folders: names and layouts of the weights, and the hyperparameters that families share.

Both sides lay out heads for the family's kind of RoPE, and weights [out, in]: tensors change their names, nothing else.
Experts alone are laid out differently: here one parameter [X, in, out] for all, in the files X tensors [out, in].
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from titan.models.family import ModelConfig
from titan.models.hf.folder import (
    CONFIG_FILE,
    HfCheckpointError,
    check_names,
    check_tensor,
    list_tensors,
    read_json,
    read_tensors,
    write_tensors,
)

_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention.o_gate.weight": "self_attn.o_gate_proj.weight",
    "attention_post_norm.weight": "attention_output_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward_post_norm.weight": "mlp_output_layernorm.weight",
    "feed_forward.router.weight": "mlp.gate.weight",
    "feed_forward.experts.w1": "mlp.experts.{}.gate_proj.weight",
    "feed_forward.experts.w2": "mlp.experts.{}.down_proj.weight",
    "feed_forward.experts.w3": "mlp.experts.{}.up_proj.weight",
}
_HEAD = _NAMES["head.weight"]


def hf_tensors(fqn: str, parameter: Tensor) -> dict[str, Tensor]:
    """A parameter as the tensors, by name, that hold it in a folder: itself or, for stacked experts, views of each."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", fqn)
    name = f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}" if layer else _NAMES[fqn]
    if "{}" not in name:
        return {name: parameter}
    return {name.format(index): expert.T for index, expert in enumerate(parameter)}


@dataclasses.dataclass(frozen=True)
class DecoderFormat:
    """Hugging Face folders of one family of decoders: a `titan.models.family.HfFormat`.

    Attributes:
      config_from_hf: the hyperparameters that a folder's config.json describes.
      to_hf_config: content of config.json, without the dtype.
    """

    config_from_hf: Callable[[str], ModelConfig]
    to_hf_config: Callable[[Any], Mapping[str, Any]]

    def load_hf(self, folder: str, model_config: ModelConfig) -> dict[str, Tensor]:
        """Reads the weights of a folder, sharded or not; the tensors of a layer's experts are stacked.

        Args:
          folder: holds `model.safetensors.index.json` with its shards, or `model.safetensors`.
          model_config: the model that is to receive them (see `config_from_hf`).

        Returns:
          The state dict of the model, on the CPU, in the model's order and in the files' dtype.

        Raises:
          HfCheckpointError: a file is missing or damaged; a tensor is missing, unexpected, of a wrong shape, or
            quantised.
        """
        parameters = _parameters(model_config)
        expected = {
            name: part.shape for fqn, meta in parameters.items() for name, part in hf_tensors(fqn, meta).items()
        }
        files = list_tensors(folder)
        is_tied = "head.weight" not in parameters
        check_names(files.source, files.paths, expected, {_HEAD} if is_tied else ())
        tensors = {}
        for name, tensor in read_tensors(files):
            if name in expected:
                check_tensor(files.paths[name], name, tensor, expected[name])
            tensors[name] = tensor
        state_dict = {}
        for fqn, meta in parameters.items():
            parts = [tensors.pop(name) for name in hf_tensors(fqn, meta)]
            state_dict[fqn] = torch.stack([part.T for part in parts]) if meta.dim() == 3 else parts[0]
        # A tied model's file may repeat the table as the head; a head of its own would be lost in silence.
        if _HEAD in tensors and not torch.equal(tensors[_HEAD], state_dict["embedding.weight"]):
            raise HfCheckpointError(
                f"{files.paths[_HEAD]}: tensor {_HEAD} differs from the embedding", "set --model.tie_embeddings=false"
            )
        return state_dict

    def save_hf(
        self,
        state_dict: Mapping[str, Tensor],
        model_config: ModelConfig,
        folder: str,
        *,
        max_shard_bytes: int = 5 * 10**9,
    ) -> None:
        """Writes weights as a folder that `load_hf` reads bit for bit, and `transformers` if it has the model.

        Args:
          state_dict: the model's state dict, complete, on any device, of any floating dtype.
          model_config: the model's configuration.
          folder: made if it does not exist; must not hold weights already, since stale shards would be taken for new
            ones.
          max_shard_bytes: a shard is closed before it grows beyond this; a single larger tensor has a shard of its own.

        Raises:
          HfCheckpointError: the folder holds weights, or a tensor is missing, unexpected or of a wrong shape.
        """
        parameters = _parameters(model_config)
        check_names("the state dict", state_dict, parameters)
        for fqn, tensor in state_dict.items():
            check_tensor("the state dict", fqn, tensor, parameters[fqn].shape)
        tensors = {name: part for fqn in parameters for name, part in hf_tensors(fqn, state_dict[fqn]).items()}
        dtype = str(state_dict["embedding.weight"].dtype).removeprefix("torch.")
        hf_config = {**self.to_hf_config(model_config), "torch_dtype": dtype}
        write_tensors(tensors, hf_config, folder, max_shard_bytes=max_shard_bytes)


def read_config(folder: str, family: str, fixed: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Path and content of config.json.

    Args:
      folder: the Hugging Face folder.
      family: how errors call the model.
      fixed: values of keys that must be these if they are present.

    Raises:
      HfCheckpointError: the file is missing or damaged, or has another value for one of these keys.
    """
    path = os.path.join(folder, CONFIG_FILE)
    config = read_json(path)
    for key, expected in fixed.items():
        if config.get(key, expected) != expected:
            problem = f"{key} is {config[key]!r}, a {family} has {expected!r}"
            raise HfCheckpointError(f"{path}: {problem}", f"give a {family} folder")
    return path, config


def rope_parameters(config: Mapping[str, Any]) -> tuple[float, str, dict[str, Any]]:
    """Theta, the kind of scaling ("default" is none) and its parameters, as transformers 4 or 5 writes them."""
    # transformers 5 keeps theta and scaling in rope_parameters, 4 has rope_theta and rope_scaling (or null).
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    return theta, rope.get("rope_type", rope.get("type", "default")), rope


def shared_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that all families' configurations have under one name, from config.json. Raises KeyError if one lacks."""
    num_heads = config["num_attention_heads"]
    return {
        "vocab_size": config["vocab_size"],
        "dim": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "max_sequence_length": config.get("max_position_embeddings", 2048),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def shared_hf_config(config: Any) -> dict[str, Any]:
    """The keys of config.json for these fields and what all families have alike, as transformers 4 calls them."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_sequence_length,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,  # the tokenizer's business; transformers would otherwise assume 1 and 2
        "eos_token_id": None,
    }


def missing_key(path: str, error: KeyError) -> HfCheckpointError:
    """The error for a key that config.json lacks."""
    return HfCheckpointError(f"{path}: the key {error.args[0]!r} is missing", "give a complete config.json")


def _parameters(model_config: ModelConfig) -> dict[str, Tensor]:
    return dict(model_config.components().build().named_parameters())
