"""Models in folders of Diffusers, where a parameter may be several tensors of the files, one below the other."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from titan.models.hf.folder import check_names, check_tensor, list_tensors, read_tensors, write_tensors

_STEM = "diffusion_pytorch_model"

Parts = Callable[[str, Tensor], dict[str, Tensor]]
"""(fully qualified name, parameter) to the tensors, by name in the files, whose concatenation along dim 0 it is."""


def load_diffusers(folder: str, parameters: Mapping[str, Tensor], parts: Parts) -> dict[str, Tensor]:
    """Reads the weights of a folder, sharded or not: the state dict of a model, in the model's order.

    Args:
      folder: holds `diffusion_pytorch_model.safetensors.index.json` with its shards, or the one file without `.index`.
      parameters: the model's parameters by fully qualified name, of which only the shapes count.
      parts: how the files hold each of them.

    Raises:
      HfCheckpointError: a file is missing or damaged; a tensor is missing, unexpected, of a wrong shape, or
        quantised.
    """
    expected = {name: part.shape for fqn, meta in parameters.items() for name, part in parts(fqn, meta).items()}
    files = list_tensors(folder, stem=_STEM)
    check_names(files.source, files.paths, expected)
    tensors = {}
    for name, tensor in read_tensors(files):
        check_tensor(files.paths[name], name, tensor, expected[name])
        tensors[name] = tensor
    state_dict = {}
    for fqn, meta in parameters.items():
        own = [tensors.pop(name) for name in parts(fqn, meta)]
        state_dict[fqn] = torch.cat(own) if len(own) > 1 else own[0]
    return state_dict


def save_diffusers(
    state_dict: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    parts: Parts,
    hf_config: Mapping[str, Any],
    folder: str,
    *,
    max_shard_bytes: int,
) -> None:
    """Writes weights as a folder that Diffusers loads with `from_pretrained`, and `load_diffusers` bit for bit.

    Args:
      state_dict: the model's state dict, complete, on any device, of any floating dtype.
      parameters: the model's parameters by fully qualified name, of which only the shapes count.
      parts: how the files hold each of them.
      hf_config: content of config.json.
      folder: made if it does not exist; must not hold weights already.
      max_shard_bytes: a shard is closed before it grows beyond this; a single larger tensor has a shard of its own.

    Raises:
      HfCheckpointError: the folder holds weights, or a tensor is missing, unexpected or of a wrong shape.
    """
    check_names("the state dict", state_dict, parameters)
    for fqn, tensor in state_dict.items():
        check_tensor("the state dict", fqn, tensor, parameters[fqn].shape)
    tensors = {name: part for fqn in parameters for name, part in parts(fqn, state_dict[fqn]).items()}
    write_tensors(tensors, hf_config, folder, max_shard_bytes=max_shard_bytes, stem=_STEM)
