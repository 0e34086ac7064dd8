"""What the configurations of all decoders have in common: their batches, checks, plan, and weights of Hugging Face."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError
from titan.core.registry import load
from titan.models.family import BatchTensor, ModelConfig

if TYPE_CHECKING:
    from titan.models.family import HfFormat
    from titan.models.layers.decoder import DecoderConfig
    from titan.parallel.parallel_plan import ParallelPlan

IGNORED_LABEL = -100
"""The label of tokens that the loss does not count; PyTorch's default for `ignore_index`."""


def attention_option() -> str:
    """The field `attention` of a family: which of `titan.models.layers.attention.INNER_ATTENTION` it has."""
    return option(
        "math",
        "Inner attention: math is explicit matmul and softmax, sdpa is PyTorch's scaled_dot_product_attention.",
        choices=("math", "sdpa"),
    )


class DecoderFamily(ModelConfig):
    """Base of the configuration of a decoder that is trained on packed rows of tokens.

    Attributes:
      components_function: "package.module:function" from the configuration to the component tree, a
        `titan.models.layers.decoder.DecoderConfig`.
      hf_format: "package.module:attribute" of the family's `HfFormat`; empty if it has none.
      inner_dim: name of the field that holds the inner dim of the feed-forward blocks, which tensor parallelism splits.
      not_of_weights: fields that may differ between runs with the same weights.
      vocab_size: number of token ids.
      num_heads: query heads.
      num_kv_heads: heads of keys and values.
      head_dim: size of one head.
      max_sequence_length: the longest row that the model is meant for, in tokens.
    """

    loss_module: ClassVar[str] = "cross_entropy"
    components_function: ClassVar[str]
    hf_format: ClassVar[str] = ""
    inner_dim: ClassVar[str] = "ffn_dim"
    not_of_weights: ClassVar[tuple[str, ...]] = ("attention", "max_sequence_length")
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_sequence_length: int

    @property
    def resolved_head_dim(self) -> int:
        """Size of one head, where a family's `head_dim` may leave it open."""
        return self.head_dim

    def validate(self) -> None:
        """Raises ConfigError where the numbers and sizes of heads contradict one another."""
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "model.num_kv_heads",
                f"{self.num_kv_heads} does not divide model.num_heads={self.num_heads}",
                "give a divisor of it",
            )
        if self.resolved_head_dim % 2:
            raise ConfigError(
                "model.head_dim",
                f"a head of {self.resolved_head_dim} elements cannot be split into the pairs that RoPE rotates",
                "give an even size",
            )

    def components(self) -> "DecoderConfig":
        """The component tree; call `build()` on it, or on what rewriting makes of it. Imports torch."""
        return load(self.components_function)(self)

    def hf(self) -> "HfFormat | None":
        """Weights and hyperparameters in Hugging Face's format; None if the family has none. Imports torch."""
        return load(self.hf_format) if self.hf_format else None

    def num_token_ids(self) -> int:
        """Size of the vocabulary."""
        return self.vocab_size

    def tensor_parallel_plan(self) -> "ParallelPlan":
        """How tensor parallelism splits the model."""
        from titan.models.layers.decoder_plan import decoder_plan

        return decoder_plan(inner_dim=self.inner_dim, num_kv_heads=self.num_kv_heads, head_dim=self.resolved_head_dim)

    def check_context_parallel(self, sequence_length: int, num_devices: int) -> None:
        """Raises ConfigError where sequences cannot be split over so many devices.

        A causal model's sequence is two chunks on each device (see `titan.parallel.context_parallel`).
        """
        unit = 2 * num_devices
        if sequence_length % unit:
            raise ConfigError(
                "training.sequence_length",
                f"{sequence_length} tokens cannot be split into two chunks for each of context_parallel={num_devices} "
                "devices",
                f"give a multiple of {unit}, e.g. {-(-sequence_length // unit) * unit}",
            )

    def weight_fields(self) -> dict[str, Any]:
        """The hyperparameters that belong to a set of weights, by name; `head_dim` as resolved."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["head_dim"] = self.resolved_head_dim
        return {name: value for name, value in fields.items() if name not in self.not_of_weights}

    def batch_tensors(self, sequence_length: int) -> tuple[BatchTensor, ...]:
        """Token ids, labels, positions within documents, and documents (0 is padding), each [sequence_length].

        Raises:
          ConfigError: the model is not meant for rows of that length.
        """
        if sequence_length > self.max_sequence_length:
            raise ConfigError(
                "training.sequence_length",
                f"{sequence_length} is above model.max_sequence_length={self.max_sequence_length}",
                "give shorter sequences, or raise the model's limit",
            )
        row = (sequence_length,)
        return (
            BatchTensor("tokens", "int32", row),
            BatchTensor("labels", "int32", row, ignored=IGNORED_LABEL),
            BatchTensor("positions", "int32", row),
            BatchTensor("segment_ids", "int32", row),
        )

    def attention_flops_per_token(self, sequence_length: int) -> float:
        """What of `flops_per_token` grows with the length: the products of queries, keys and values."""
        return self.flops_per_token(sequence_length) - self.flops_per_token(0)
