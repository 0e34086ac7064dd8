"""Hugging Face folders: safetensors shards, the JSON index of them, and config.json.

The files of `transformers` are named `model`, those of `diffusers` `diffusion_pytorch_model`: the functions take the
name as `stem`.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

CONFIG_FILE = "config.json"
"""Name of the file with the hyperparameters."""

_INDEX_SUFFIX = ".safetensors.index.json"
_STEM = "model"
_CURE = "give the weights of this model, or the --model flags of these weights"


class HfCheckpointError(ValueError):
    """A Hugging Face folder that does not fit; its text is one line.

    Attributes:
      problem: names the file, and the tensor or key.
      cure: what to do; empty where there is nothing to say.
    """

    def __init__(self, problem: str, cure: str = ""):
        super().__init__(f"{problem}; {cure}" if cure else problem)
        self.problem = problem
        self.cure = cure


class TensorFiles(NamedTuple):
    """The tensors of a folder and where they are.

    Attributes:
      source: path of the file that lists the tensors, the index or the only shard.
      paths: for each tensor's name the path of the file that holds it.
    """

    source: str
    paths: dict[str, str]


def list_tensors(folder: str, *, stem: str = _STEM) -> TensorFiles:
    """Finds the tensors of a folder, sharded or not, without reading any.

    Args:
      folder: the Hugging Face folder.
      stem: what the files' names begin with.

    Raises:
      HfCheckpointError: there are no weights, or the index is damaged.
    """
    names = f"{stem}{_INDEX_SUFFIX}", f"{stem}.safetensors"
    index, single = (os.path.join(folder, name) for name in names)
    if os.path.exists(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise HfCheckpointError(f"{index}: there is no weight_map", "give the index that belongs to the shards")
        for name, file in weight_map.items():
            if os.path.basename(file) != file:
                raise HfCheckpointError(f"{index}: {name} is in {file!r}, which is not a file name in the same folder")
        return TensorFiles(index, {name: os.path.join(folder, file) for name, file in weight_map.items()})
    if os.path.exists(single):
        with _open(single) as tensors:
            return TensorFiles(single, dict.fromkeys(tensors.keys(), single))
    raise HfCheckpointError(
        f"{folder}: there is neither {names[0]} nor {names[1]}", "give a folder of safetensors weights"
    )


def read_tensors(files: TensorFiles) -> Iterator[tuple[str, Tensor]]:
    """Names and values of all tensors, on the CPU, file by file.

    Raises:
      HfCheckpointError: a file is missing, damaged, or holds other tensors than the index says.
    """
    for path in sorted(set(files.paths.values())):
        names = [name for name, where in files.paths.items() if where == path]
        with _open(path) as tensors:
            check_names(path, tensors.keys(), names)
            for name in names:
                yield name, tensors.get_tensor(name)


def write_tensors(
    tensors: Mapping[str, Tensor],
    hf_config: Mapping[str, Any],
    folder: str,
    *,
    max_shard_bytes: int,
    stem: str = _STEM,
) -> None:
    """Writes a folder that `transformers` or `diffusers` loads with `from_pretrained`.

    Args:
      tensors: by Hugging Face's name, on any device; views are made contiguous shard by shard.
      hf_config: content of config.json.
      folder: made if it does not exist; must not hold weights already, since stale shards would be taken for new ones.
      max_shard_bytes: a shard is closed before it grows beyond this; a single larger tensor has a shard of its own.
      stem: what the files' names begin with.

    Raises:
      HfCheckpointError: the folder holds weights.
    """
    os.makedirs(folder, exist_ok=True)
    present = sorted(name for name in os.listdir(folder) if name.endswith((".safetensors", _INDEX_SUFFIX)))
    if present:
        raise HfCheckpointError(
            f"{os.path.join(folder, present[0])}: there are weights already", "give an empty folder"
        )
    weight_map = {}
    shards = _shards(tensors, max_shard_bytes)
    for number, names in enumerate(shards, start=1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = {name: tensors[name].detach().cpu().contiguous() for name in names}
        save_file(shard, os.path.join(folder, file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(os.path.join(folder, CONFIG_FILE), hf_config)
    # The index comes last: without it the folder holds no weights for any reader.
    _write_json(
        os.path.join(folder, f"{stem}{_INDEX_SUFFIX}"),
        {"metadata": {"total_size": total_bytes}, "weight_map": weight_map},
    )


def check_names(source: str, found: Collection[str], expected: Collection[str], optional: Collection[str] = ()) -> None:
    """Raises HfCheckpointError, naming `source` and the tensor, where one is missing or unexpected."""
    found, expected = set(found), set(expected)
    for problem, names in (("missing", expected - found), ("unexpected", found - expected - set(optional))):
        if names:
            first, more = min(names), f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise HfCheckpointError(f"{source}: tensor {first} is {problem}{more}", _CURE)


def check_tensor(source: str, name: str, tensor: Tensor, shape: torch.Size) -> None:
    """Raises HfCheckpointError, naming `source` and the tensor, unless it has the shape and is not quantised."""
    if tensor.shape != shape:
        raise HfCheckpointError(
            f"{source}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}", _CURE
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise HfCheckpointError(f"{source}: tensor {name} is {tensor.dtype}", "give weights that are not quantised")


def read_json(path: str) -> dict[str, Any]:
    """The JSON object in a file. Raises HfCheckpointError if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise HfCheckpointError(f"{path}: cannot be read as JSON ({error})", "give a complete folder") from error
    if not isinstance(content, dict):
        raise HfCheckpointError(f"{path}: is no JSON object", "give a complete folder")
    return content


def _write_json(path: str, content: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def _open(path: str) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise HfCheckpointError(f"{path}: there is no such file, but the index names it", "fetch it again") from error
    except (SafetensorError, OSError) as error:
        raise HfCheckpointError(f"{path}: cannot be read as safetensors ({error})", "fetch it again") from error


def _shards(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and shard_bytes + tensor.nbytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += tensor.nbytes
    return shards
