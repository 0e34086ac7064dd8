"""FLUX.1 transformers in and out of Diffusers folders (`FluxTransformer2DModel`; `transformer` in a pipeline's folder).

The files hold queries, keys and values as three tensors each; here they are one parameter, in that order. In a model
whose single blocks have a fused projection, that is these three and the feed-forward's first matrix.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan.models.flux.config import FluxConfig
from titan.models.hf.decoder import missing_key, read_config
from titan.models.hf.diffusers import Parts, load_diffusers, save_diffusers
from titan.models.hf.folder import HfCheckpointError

_CLASS = "FluxTransformer2DModel"
_FIXED = {"_class_name": _CLASS, "patch_size": 1}
# Keys of config.json by the field that they hold.
_KEYS = {
    "num_double_blocks": "num_layers",
    "num_single_blocks": "num_single_layers",
    "num_heads": "num_attention_heads",
    "in_channels": "in_channels",
    "text_dim": "joint_attention_dim",
    "pooled_dim": "pooled_projection_dim",
    "guidance_embedding": "guidance_embeds",
}
# Keys that Diffusers takes for these where config.json, like that of the published FLUX.1-dev, has them not.
_DEFAULTS = {"axes_dims_rope": (16, 56, 56), "guidance_embeds": False}
_HEADS = ("attn.to_q", "attn.to_k", "attn.to_v")
# Names of modules, of a block's within the block; with several, their tensors lie one below the other.
_MODULES = {
    "image_in": ("x_embedder",),
    "text_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "pooled_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "pooled_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "final_modulation.linear": ("norm_out.linear",),
    "head": ("proj_out",),
}
_BLOCK_MODULES = {
    "double_blocks": {
        "image.modulation.linear": ("norm1.linear",),
        "image.projection": _HEADS,
        "image.qkv.q_norm": ("attn.norm_q",),
        "image.qkv.k_norm": ("attn.norm_k",),
        "image.out": ("attn.to_out.0",),
        "image.feed_forward.w_in": ("ff.net.0.proj",),
        "image.feed_forward.w_out": ("ff.net.2",),
        "text.modulation.linear": ("norm1_context.linear",),
        "text.projection": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "text.qkv.q_norm": ("attn.norm_added_q",),
        "text.qkv.k_norm": ("attn.norm_added_k",),
        "text.out": ("attn.to_add_out",),
        "text.feed_forward.w_in": ("ff_context.net.0.proj",),
        "text.feed_forward.w_out": ("ff_context.net.2",),
    },
    "single_blocks": {
        "modulation.linear": ("norm.linear",),
        "projection.qkv": _HEADS,
        "projection.feed_forward": ("proj_mlp",),
        "projection.linear": (*_HEADS, "proj_mlp"),
        "qkv.q_norm": ("attn.norm_q",),
        "qkv.k_norm": ("attn.norm_k",),
        "out": ("proj_out",),
    },
}
_BLOCKS = {"double_blocks": "transformer_blocks", "single_blocks": "single_transformer_blocks"}


def load_hf(folder: str, model_config: FluxConfig) -> dict[str, Tensor]:
    """Reads the weights of a Diffusers folder, sharded or not.

    Args:
      folder: holds `diffusion_pytorch_model.safetensors.index.json` with its shards, or the one file without `.index`.
      model_config: the model that is to receive them (see `config_from_hf`).

    Returns:
      The state dict of the model, on the CPU, in the model's order and in the files' dtype.

    Raises:
      HfCheckpointError: a file is missing or damaged; a tensor is missing, unexpected, of a wrong shape, or
        quantised.
    """
    return load_diffusers(folder, _parameters(model_config), parts_of(model_config))


def save_hf(
    state_dict: Mapping[str, Tensor], model_config: FluxConfig, folder: str, *, max_shard_bytes: int = 10 * 10**9
) -> None:
    """Writes weights as a folder that Diffusers loads with `from_pretrained`, and `load_hf` bit for bit.

    Args:
      state_dict: the model's state dict, complete, on any device, of any floating dtype.
      model_config: the model's configuration.
      folder: made if it does not exist; must not hold weights already, since stale shards would be taken for new ones.
      max_shard_bytes: a shard is closed before it grows beyond this; a single larger tensor has a shard of its own.

    Raises:
      HfCheckpointError: the folder holds weights, or a tensor is missing, unexpected or of a wrong shape.
    """
    save_diffusers(
        state_dict,
        _parameters(model_config),
        parts_of(model_config),
        to_hf_config(model_config),
        folder,
        max_shard_bytes=max_shard_bytes,
    )


def config_from_hf(folder: str) -> FluxConfig:
    """The hyperparameters that a folder's config.json describes.

    Raises:
      HfCheckpointError: the file is missing or damaged, or describes another model (another class, other patches, more
        outputs than inputs).
    """
    path, config = read_config(folder, "FLUX.1 transformer", _FIXED)
    config = {**_DEFAULTS, **config}
    try:
        head_dim, in_channels = config["attention_head_dim"], config["in_channels"]
        if config.get("out_channels") not in (None, in_channels):
            raise HfCheckpointError(
                f"{path}: out_channels is {config['out_channels']!r}, in_channels {in_channels!r}",
                "give a model that predicts what it is given",
            )
        own = {field: config[key] for field, key in _KEYS.items()}
        return FluxConfig(**own, dim=head_dim * own["num_heads"], rope_dims=tuple(config["axes_dims_rope"]))
    except KeyError as error:
        raise missing_key(path, error) from error


def to_hf_config(config: FluxConfig) -> dict[str, Any]:
    """Content of config.json."""
    return {
        **_FIXED,
        **{key: getattr(config, field) for field, key in _KEYS.items()},
        "out_channels": None,
        "attention_head_dim": config.head_dim,
        "axes_dims_rope": list(config.rope_dims),
    }


def _parameters(model_config: FluxConfig) -> dict[str, Tensor]:
    return dict(model_config.components().build().named_parameters())


def parts_of(model_config: FluxConfig) -> Parts:
    """How the files hold the parameters of a model with these hyperparameters."""

    def parts(fqn: str, parameter: Tensor) -> dict[str, Tensor]:
        block = re.fullmatch(r"(double_blocks|single_blocks)\.(\d+)\.(.+)", fqn)
        module, _, kind = (block[3] if block else fqn).rpartition(".")
        names = _BLOCK_MODULES[block[1]][module] if block else _MODULES[module]
        prefix = f"{_BLOCKS[block[1]]}.{block[2]}." if block else ""
        if len(names) == 1:
            return {f"{prefix}{names[0]}.{kind}": parameter}
        sizes = [model_config.dim] * 3 + [len(parameter) - 3 * model_config.dim] * (len(names) - 3)
        pieces = torch.split(parameter, sizes)
        return {f"{prefix}{name}.{kind}": piece for name, piece in zip(names, pieces, strict=True)}

    return parts
