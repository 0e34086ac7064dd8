"""What a program may ask of any model family: its configuration's methods, and its weights in Hugging Face's format.

Both are protocols, which a family's configuration class and its module `hf` satisfy by having the members.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from titan.parallel.parallel_plan import ParallelPlan


class ModelConfig(Protocol):
    """The hyperparameters of one model: a frozen dataclass whose fields are the flags `--model.*`."""

    vocab_size: int
    max_sequence_length: int

    def validate(self) -> None:
        """Raises ConfigError where hyperparameters contradict one another."""

    def components(self) -> Any:
        """The tree of component configurations, with a method `build()` that makes the model on the meta device."""

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs that the model needs per trained token, forward and backward, without recompute."""

    def weight_fields(self) -> dict[str, Any]:
        """The hyperparameters that belong to a set of weights, by the name of the field."""

    def tensor_parallel_plan(self) -> "ParallelPlan":
        """How tensor parallelism splits the model; a family without this method cannot be split."""

    def hf(self) -> "HfFormat":
        """The family's reader and writer of Hugging Face folders."""


class HfFormat(Protocol):
    """Hugging Face folders of one family. Every function raises HfCheckpointError for a folder that does not fit."""

    def config_from_hf(self, folder: str) -> ModelConfig:
        """The hyperparameters that the folder's config.json describes."""

    def load_hf(self, folder: str, model_config: ModelConfig) -> dict[str, "Tensor"]:
        """The state dict of the model, on the CPU, in the files' dtype."""

    def save_hf(self, state_dict: Mapping[str, "Tensor"], model_config: ModelConfig, folder: str) -> None:
        """Writes a folder that `transformers` and `load_hf` read."""
