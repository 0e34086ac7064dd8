"""FLUX.1's autoencoder in and out of Diffusers folders (`AutoencoderKL`; `vae` in a pipeline's folder)."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from titan.models.flux.autoencoder.config import AutoencoderConfig
from titan.models.hf.decoder import missing_key, read_config
from titan.models.hf.diffusers import load_diffusers, save_diffusers
from titan.models.hf.folder import HfCheckpointError

_FIXED = {
    "_class_name": "AutoencoderKL",
    "in_channels": 3,
    "out_channels": 3,
    "act_fn": "silu",
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": True,
}
# Keys that Diffusers would assume to be otherwise where a file lacks them: it must have them.
_REQUIRED = ("use_quant_conv", "use_post_quant_conv")
# Keys of config.json by the field that they hold.
_KEYS = {
    "num_res_blocks": "layers_per_block",
    "latent_channels": "latent_channels",
    "num_groups": "norm_num_groups",
    "scale": "scaling_factor",
    "shift": "shift_factor",
}
# Parts of names, in the order in which they are replaced.
_NAMES = (
    (r"\.mid\.block1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attention\.norm\.", ".mid_block.attentions.0.group_norm."),
    (r"\.mid\.attention\.w([qkv])\.", r".mid_block.attentions.0.to_\1."),
    (r"\.mid\.attention\.wo\.", ".mid_block.attentions.0.to_out.0."),
    (r"\.(down|up)\.(\d+)\.blocks\.", r".\1_blocks.\2.resnets."),
    (r"\.(down|up)\.(\d+)\.(down|up)sample\.", r".\1_blocks.\2.\3samplers.0.conv."),
    (r"\.shortcut\.", ".conv_shortcut."),
    (r"\.norm_out\.", ".conv_norm_out."),
)


def load_hf(folder: str, config: AutoencoderConfig) -> dict[str, Tensor]:
    """The state dict of the model, on the CPU, in the files' dtype, out of a Diffusers folder.

    Raises:
      HfCheckpointError: a file is missing or damaged; a tensor is missing, unexpected, of a wrong shape, or
        quantised.
    """
    return load_diffusers(folder, dict(config.build().named_parameters()), parts_of)


def save_hf(
    state_dict: Mapping[str, Tensor], config: AutoencoderConfig, folder: str, *, max_shard_bytes: int = 10 * 10**9
) -> None:
    """Writes weights as a folder that Diffusers loads with `from_pretrained`, and `load_hf` bit for bit.

    Args:
      state_dict: the model's state dict, complete, on any device, of any floating dtype.
      config: the model's configuration.
      folder: made if it does not exist; must not hold weights already.
      max_shard_bytes: a shard is closed before it grows beyond this.

    Raises:
      HfCheckpointError: the folder holds weights, or a tensor is missing, unexpected or of a wrong shape.
    """
    parameters = dict(config.build().named_parameters())
    save_diffusers(state_dict, parameters, parts_of, to_hf_config(config), folder, max_shard_bytes=max_shard_bytes)


def config_from_hf(folder: str) -> AutoencoderConfig:
    """The hyperparameters that a folder's config.json describes.

    Raises:
      HfCheckpointError: the file is missing or damaged, or describes another model (another class, one with
        convolutions around the latents, or without attention).
    """
    path, content = read_config(folder, "FLUX.1 autoencoder", _FIXED)
    try:
        for key in _REQUIRED:
            content[key]
        channels = content["block_out_channels"]
        if any(width % channels[0] for width in channels):
            raise HfCheckpointError(
                f"{path}: block_out_channels {channels} are no multiples of the first", "give a FLUX.1 autoencoder"
            )
        own = {field: content[key] for field, key in _KEYS.items()}
    except KeyError as error:
        raise missing_key(path, error) from error
    return AutoencoderConfig(**own, channels=channels[0], multipliers=tuple(width // channels[0] for width in channels))


def to_hf_config(config: AutoencoderConfig) -> dict[str, Any]:
    """Content of config.json."""
    num_resolutions = len(config.multipliers)
    return {
        **_FIXED,
        **{key: getattr(config, field) for field, key in _KEYS.items()},
        "block_out_channels": [config.channels * multiplier for multiplier in config.multipliers],
        "down_block_types": ["DownEncoderBlock2D"] * num_resolutions,
        "up_block_types": ["UpDecoderBlock2D"] * num_resolutions,
    }


def parts_of(fqn: str, parameter: Tensor) -> dict[str, Tensor]:
    """A parameter as the one tensor, by name, that holds it in the files."""
    for ours, theirs in _NAMES:
        fqn = re.sub(ours, theirs, fqn)
    return {fqn: parameter}
