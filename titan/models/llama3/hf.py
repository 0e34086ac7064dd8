"""Llama 3 weights in and out of Hugging Face folders: safetensors shards, their index JSON, and config.json.

Both sides use the half-rotation layout of RoPE and [out, in] weights, so tensors change their names and nothing else.
"""

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan.models.llama3.config import Llama3Config

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_CONFIG = "config.json"

_HF_NAMES = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_HF_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


class HfCheckpointError(ValueError):
    """A Hugging Face folder that does not fit; the message is one line naming the file, and the tensor or key."""


def load_hf(folder: str, model_config: Llama3Config) -> dict[str, Tensor]:
    """Reads the weights of a Hugging Face Llama folder, sharded or not.

    Args:
      folder: holds `model.safetensors.index.json` with its shards, or `model.safetensors`.
      model_config: the model that is to receive them (see `config_from_hf`).

    Returns:
      The state dict of the model, on the CPU, in the model's order and in the files' dtype.

    Raises:
      HfCheckpointError: a file is missing or damaged; a tensor is missing, unexpected, of a wrong shape, or
        quantised.
    """
    shapes = _shapes(model_config)
    fqns = {_hf_name(fqn): fqn for fqn in shapes}
    source, files = _tensor_files(folder)
    allowed = {"lm_head.weight"} if model_config.tie_embeddings else set()
    _check_names(source, set(files), set(fqns), allowed)
    state_dict = {}
    for file in sorted(set(files.values())):
        for name, tensor in _read(file, [name for name, where in files.items() if where == file]):
            if name not in fqns:
                continue
            _check_tensor(file, name, tensor, shapes[fqns[name]])
            state_dict[fqns[name]] = tensor
    if "lm_head.weight" in files and model_config.tie_embeddings:
        _check_tied(files["lm_head.weight"], state_dict["embedding.weight"])
    return {fqn: state_dict[fqn] for fqn in shapes}


def save_hf(
    state_dict: dict[str, Tensor], model_config: Llama3Config, folder: str, *, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Writes weights as a folder that `transformers` loads with `from_pretrained`, and `load_hf` bit for bit.

    Args:
      state_dict: the model's state dict, complete, on any device, of any floating dtype.
      model_config: the model's configuration.
      folder: made if it does not exist; must not hold weights already, since stale shards would be taken for new ones.
      max_shard_bytes: a shard is closed before it grows beyond this; a single larger tensor has a shard of its own.

    Raises:
      HfCheckpointError: the folder holds weights, or a tensor is missing, unexpected or of a wrong shape.
    """
    shapes = _shapes(model_config)
    _check_names("the state dict", set(state_dict), set(shapes), set())
    for fqn, tensor in state_dict.items():
        _check_tensor("the state dict", fqn, tensor, shapes[fqn])
    os.makedirs(folder, exist_ok=True)
    present = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") or name == _INDEX)
    if present:
        raise HfCheckpointError(f"{os.path.join(folder, present[0])}: there are weights already; give an empty folder")
    weight_map = {}
    shards = _shards(state_dict, list(shapes), max_shard_bytes)
    for number, fqns in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {_hf_name(fqn): state_dict[fqn].detach().cpu().contiguous() for fqn in fqns}
        save_file(tensors, os.path.join(folder, file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    total_bytes = sum(tensor.nbytes for tensor in state_dict.values())
    dtype = str(state_dict["embedding.weight"].dtype).removeprefix("torch.")
    _write_json(os.path.join(folder, _CONFIG), _to_hf_config(model_config, dtype))
    # The index comes last: without it the folder holds no weights for any reader.
    _write_json(os.path.join(folder, _INDEX), {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def config_from_hf(folder: str) -> Llama3Config:
    """The hyperparameters that a Hugging Face folder's config.json describes, as transformers 4 or 5 writes it.

    Raises:
      HfCheckpointError: the file is missing or damaged, or describes a model that is no Llama 3 (another model
        type, biases, another activation or RoPE scaling).
    """
    path = os.path.join(folder, _CONFIG)
    config = _read_json(path)
    fixed = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, expected in fixed.items():
        if config.get(key, expected) != expected:
            problem = f"{key} is {config[key]!r}, a Llama 3 has {expected!r}"
            raise HfCheckpointError(f"{path}: {problem}; give a Llama 3 folder")
    try:
        dim, num_heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or 0
        return Llama3Config(
            vocab_size=config["vocab_size"],
            dim=dim,
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=0 if head_dim * num_heads == dim else head_dim,
            ffn_dim=config["intermediate_size"],
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_sequence_length=config.get("max_position_embeddings", 2048),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            **_rope_from_hf(path, config),
        )
    except KeyError as error:
        raise HfCheckpointError(f"{path}: the key {error.args[0]!r} is missing; give a complete config.json") from error


def _rope_from_hf(path: str, config: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 keeps theta and scaling in rope_parameters, 4 has rope_theta and rope_scaling (or null).
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    fields: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return fields
    if kind != "llama3":
        raise HfCheckpointError(f"{path}: RoPE scaling {kind!r} is not supported; give a model with 'llama3' or none")
    return {
        **fields,
        "rope_scaling": "llama3",
        "rope_scaling_factor": float(rope["factor"]),
        "rope_low_frequency_factor": float(rope["low_freq_factor"]),
        "rope_high_frequency_factor": float(rope["high_freq_factor"]),
        "rope_original_max_length": rope["original_max_position_embeddings"],
    }


def _to_hf_config(config: Llama3Config, dtype: str) -> dict[str, Any]:
    """config.json in the keys of transformers 4, which 5 reads as well."""
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_scaling_factor,
        "low_freq_factor": config.rope_low_frequency_factor,
        "high_freq_factor": config.rope_high_frequency_factor,
        "original_max_position_embeddings": config.rope_original_max_length,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.resolved_head_dim,
        "intermediate_size": config.ffn_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if config.rope_scaling == "llama3" else None,
        "max_position_embeddings": config.max_sequence_length,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,  # the tokenizer's business; transformers would otherwise assume 1 and 2
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def _hf_name(fqn: str) -> str:
    """`layers.3.attention.wq.weight` to `model.layers.3.self_attn.q_proj.weight`."""
    module, _, parameter = fqn.rpartition(".")
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    name = f"model.layers.{layer[1]}.{_HF_LAYER_NAMES[layer[2]]}" if layer else _HF_NAMES[module]
    return f"{name}.{parameter}"


def _shapes(config: Llama3Config) -> dict[str, torch.Size]:
    return {fqn: parameter.shape for fqn, parameter in config.components().build().named_parameters()}


def _shards(state_dict: dict[str, Tensor], fqns: list[str], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for fqn in fqns:
        num_bytes = state_dict[fqn].nbytes
        if shards[-1] and shard_bytes + num_bytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(fqn)
        shard_bytes += num_bytes
    return shards


def _tensor_files(folder: str) -> tuple[str, dict[str, str]]:
    """The file that lists the tensors, and for each tensor the path of the file that holds it."""
    index, single = os.path.join(folder, _INDEX), os.path.join(folder, _SINGLE)
    if os.path.exists(index):
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise HfCheckpointError(f"{index}: there is no weight_map; give the index that belongs to the shards")
        for name, file in weight_map.items():
            if os.path.basename(file) != file:
                raise HfCheckpointError(f"{index}: {name} is in {file!r}, which is not a file name in the same folder")
        return index, {name: os.path.join(folder, file) for name, file in weight_map.items()}
    if os.path.exists(single):
        with _open(single) as tensors:
            return single, dict.fromkeys(tensors.keys(), single)
    raise HfCheckpointError(f"{folder}: there is neither {_INDEX} nor {_SINGLE}; give a folder of safetensors weights")


def _open(path: str) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise HfCheckpointError(f"{path}: there is no such file, but the index names it; fetch it again") from error
    except (SafetensorError, OSError) as error:
        raise HfCheckpointError(f"{path}: cannot be read as safetensors ({error}); fetch it again") from error


def _read(path: str, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    with _open(path) as tensors:
        _check_names(path, set(tensors.keys()), set(names), set())
        for name in names:
            yield name, tensors.get_tensor(name)


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise HfCheckpointError(f"{path}: cannot be read as JSON ({error}); give a complete folder") from error
    if not isinstance(content, dict):
        raise HfCheckpointError(f"{path}: is no JSON object; give a complete folder")
    return content


def _write_json(path: str, content: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def _check_names(source: str, found: set[str], expected: set[str], allowed: set[str]) -> None:
    problems = (("missing", expected - found), ("unexpected", found - expected - allowed))
    for problem, names in problems:
        if names:
            first, more = min(names), f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            cure = "give the weights of this model, or the --model flags of these weights"
            raise HfCheckpointError(f"{source}: tensor {first} is {problem}{more}; {cure}")


def _check_tensor(source: str, name: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        raise HfCheckpointError(
            f"{source}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}; "
            "give the weights of this model, or the --model flags of these weights"
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise HfCheckpointError(f"{source}: tensor {name} is {tensor.dtype}; give weights that are not quantised")


def _check_tied(file: str, embedding: Tensor) -> None:
    """A tied model's file may repeat the table as the head; a head of its own would be lost in silence."""
    with _open(file) as tensors:
        if not torch.equal(tensors.get_tensor("lm_head.weight"), embedding):
            raise HfCheckpointError(
                f"{file}: tensor lm_head.weight differs from the embedding; set --model.tie_embeddings=false"
            )
