"""Weights in and out of a run in Hugging Face's format (`--checkpoint.load_hf`, `--checkpoint.save_hf`)."""

import dataclasses
import pathlib
from collections.abc import Mapping

import torch

from titan.core.config.validate import ConfigError
from titan.models.llama3.hf import HfCheckpointError, config_from_hf, load_hf, save_hf
from titan.train.config import Config

# Of the hyperparameters these do not belong to the weights.
_FREE = ("attention", "max_sequence_length")


def check_hf(config: Config) -> None:
    """Checks, before anything is compiled, the weights to load against the model and the folder of those to save.

    Raises:
      ConfigError: the folder to load is not a Llama's or of other hyperparameters; the folder to save holds weights.
    """
    if config.checkpoint.load_hf:
        try:
            saved = config_from_hf(str(_folder(config.checkpoint.load_hf)))
        except HfCheckpointError as error:
            raise _config_error("checkpoint.load_hf", error) from error
        for field in dataclasses.fields(saved):
            name, theirs = field.name, getattr(saved, field.name)
            ours = getattr(config.model, name)
            if name == "head_dim":
                ours, theirs = config.model.resolved_head_dim, saved.resolved_head_dim
            if name not in _FREE and ours != theirs:
                raise ConfigError(
                    f"model.{name}",
                    f"{ours} is not the {theirs} of the weights in {config.checkpoint.load_hf}",
                    f"give --model.{name}={theirs}, or other weights",
                )
    if config.checkpoint.save_hf and any(_folder(config.checkpoint.save_hf).glob("*.safetensors*")):
        raise ConfigError(
            "checkpoint.save_hf", f"{config.checkpoint.save_hf} holds weights already", "give an empty or new folder"
        )


def read_hf(config: Config) -> dict[str, torch.Tensor]:
    """The weights to begin from, by fully qualified name, on the CPU and in the files' dtype.

    Raises:
      ConfigError: a file is damaged, or lacks or exceeds what the model has.
    """
    try:
        return load_hf(str(_folder(config.checkpoint.load_hf)), config.model)
    except HfCheckpointError as error:
        raise _config_error("checkpoint.load_hf", error) from error


def write_hf(config: Config, weights: Mapping[str, torch.Tensor]) -> pathlib.Path:
    """Writes a run's final weights; returns the folder."""
    folder = _folder(config.checkpoint.save_hf)
    try:
        save_hf(dict(weights), config.model, str(folder))
    except HfCheckpointError as error:
        raise _config_error("checkpoint.save_hf", error) from error
    return folder


def _folder(path: str) -> pathlib.Path:
    return pathlib.Path(path).expanduser()


def _config_error(flag: str, error: HfCheckpointError) -> ConfigError:
    problem, _, cure = str(error).rpartition("; ")
    return ConfigError(flag, problem or str(error), cure if problem else "give another folder")
