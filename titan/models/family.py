"""What a program may ask of any model family: its configuration's methods, and its weights in Hugging Face's format.

Both are protocols, which a family's configuration class and its module `hf` satisfy by having the members.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from titan.parallel.parallel_plan import ParallelPlan


@dataclasses.dataclass(frozen=True)
class BatchTensor:
    """One tensor of a training batch.

    Attributes:
      name: its key in the batch.
      dtype: "int32" or "float32".
      shape: the shape of one row; a batch has it behind [microbatch, row].
      ignored: the value of this tensor's elements that the loss does not count. None: not this tensor tells which
        elements count. In each batch exactly one tensor does.
      tokens: what the first dim of a row is. "sequence": tokens, each of which sees those before it; "set": tokens that
        see one another; "": not tokens.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ignored: int | None = None
    tokens: str = "sequence"


class ModelConfig(Protocol):
    """The hyperparameters of one model: a frozen dataclass whose fields are the flags `--model.*`.

    Attributes:
      loss_module: name of the model's submodule that computes the loss from what the network gives.
    """

    loss_module: ClassVar[str]

    def validate(self) -> None:
        """Raises ConfigError where hyperparameters contradict one another."""

    def components(self) -> Any:
        """The tree of component configurations, with a method `build()` that makes the model on the meta device."""

    def batch_tensors(self, sequence_length: int) -> tuple[BatchTensor, ...]:
        """The tensors of a batch, in the order in which the model's `loss` takes them.

        Args:
          sequence_length: tokens of one packed row, of all kinds together.

        Raises:
          ConfigError: the model cannot be trained on rows of that length.
        """

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs that the model needs per trained token, forward and backward, without recompute."""

    def attention_flops_per_token(self, sequence_length: int) -> float:
        """Those of `flops_per_token` that are products of queries, keys and values, in all layers together."""

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
        """Writes a folder that `transformers` or `diffusers`, whichever has the model, and `load_hf` read."""
