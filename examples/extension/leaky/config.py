"""Flags: the hyperparameters of the family, and the section of its kernel. Imports neither torch nor JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError
from titan.models.family import BatchTensor, ModelConfig

if TYPE_CHECKING:
    from leaky.model import LeakyModelConfig


@dataclasses.dataclass(frozen=True)
class LeakyConfig(ModelConfig):
    """Hyperparameters of a language model that mixes tokens by leaky sums instead of attention."""

    loss_module: ClassVar[str] = "cross_entropy"

    vocab_size: int = option(4096, "Number of token ids; at least the tokenizer's.", minimum=1)
    dim: int = option(128, "Model dim: width of the residual stream.", minimum=1)
    num_layers: int = option(2, "Number of blocks.", minimum=1)
    ffn_dim: int = option(512, "Inner dim of the feed-forward block.", minimum=1)
    slowest_decay: float = option(0.98, "What the slowest channel keeps of its sum; below 1.", minimum=0, maximum=1)

    def validate(self) -> None:
        """Raises ConfigError for a sum that would keep all of its past."""
        if self.slowest_decay == 1:
            raise ConfigError("model.slowest_decay", "1 never forgets", "give a number below 1, e.g. 0.98")

    def components(self) -> "LeakyModelConfig":
        """The component tree. Imports torch."""
        from leaky.model import leaky_components

        return leaky_components(self)

    def batch_tensors(self, sequence_length: int) -> tuple[BatchTensor, ...]:
        """Token ids, labels, positions within documents, and documents (0 is padding), each [sequence_length]."""
        row = (sequence_length,)
        return (
            BatchTensor("tokens", "int32", row),
            BatchTensor("labels", "int32", row, ignored=-100),
            BatchTensor("positions", "int32", row),
            BatchTensor("segment_ids", "int32", row),
        )

    def flops_per_token(self, sequence_length: int) -> float:
        """Matrix products of forward and backward, two FLOPs per multiply-add."""
        return 6.0 * self.dim * (2 * self.num_layers * self.ffn_dim + self.vocab_size)

    def attention_flops_per_token(self, sequence_length: int) -> float:
        """None: there is no attention."""
        return 0.0

    def weight_fields(self) -> dict[str, Any]:
        """All fields belong to a set of weights."""
        return dataclasses.asdict(self)

    def num_token_ids(self) -> int:
        """Size of the vocabulary."""
        return self.vocab_size


@dataclasses.dataclass(frozen=True)
class SquaredReluKernelConfig:
    """The activation of the leaky model as a kernel."""

    enable: bool = option(False, "Compute the squared ReLU by a Pallas kernel (interpreted, slowly, off TPU).")
    block_rows: int = option(256, "Rows of a block; a multiple of 16.", minimum=16)

    def validate(self) -> None:
        """Raises ConfigError for blocks that no register takes."""
        if self.block_rows % 16:
            raise ConfigError(
                "squared_relu_kernel.block_rows", f"{self.block_rows} is no multiple of 16", "give e.g. 256"
            )
