"""Weights in and out of a run in Hugging Face's format (`--checkpoint.load_hf`, `--checkpoint.save_hf`)."""

import pathlib
from collections.abc import Mapping

import torch

from titan.core.config.validate import ConfigError
from titan.models.hf.folder import HfCheckpointError
from titan.train.config.run import Config


def check_hf(config: Config) -> None:
    """Checks, before anything is compiled, the weights to load against the model and the folder of those to save.

    Raises:
      ConfigError: the family has no such weights; the folder to load is of another family or of other
        hyperparameters; the folder to save holds weights.
    """
    for name in ("load_hf", "save_hf"):
        if getattr(config.checkpoint, name) and config.model.hf() is None:
            problem = f"{config.model.family} has no weights in Hugging Face's format"
            raise ConfigError(f"checkpoint.{name}", problem, "leave it out: checkpoints of runs keep the weights too")
    if config.checkpoint.load_hf:
        try:
            saved = config.model.hf().config_from_hf(str(_folder(config.checkpoint.load_hf)))
        except HfCheckpointError as error:
            raise _config_error("checkpoint.load_hf", error) from error
        if type(saved) is not type(config.model):
            raise ConfigError(
                "checkpoint.load_hf",
                f"the weights in {config.checkpoint.load_hf} are those of a {type(saved).__name__}, the model is a "
                f"{type(config.model).__name__}",
                "give other weights, or use a recipe of that kind of model",
            )
        ours = config.model.weight_fields()
        for name, theirs in saved.weight_fields().items():
            if ours[name] != theirs:
                raise ConfigError(
                    f"model.{name}",
                    f"{ours[name]} is not the {theirs} of the weights in {config.checkpoint.load_hf}",
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
        return config.model.hf().load_hf(str(_folder(config.checkpoint.load_hf)), config.model)
    except HfCheckpointError as error:
        raise _config_error("checkpoint.load_hf", error) from error


def write_hf(config: Config, weights: Mapping[str, torch.Tensor]) -> pathlib.Path:
    """Writes a run's final weights; returns the folder."""
    folder = _folder(config.checkpoint.save_hf)
    try:
        config.model.hf().save_hf(weights, config.model, str(folder))
    except HfCheckpointError as error:
        raise _config_error("checkpoint.save_hf", error) from error
    return folder


def _folder(path: str) -> pathlib.Path:
    return pathlib.Path(path).expanduser()


def _config_error(flag: str, error: HfCheckpointError) -> ConfigError:
    return ConfigError(flag, error.problem, error.cure or "give another folder")
