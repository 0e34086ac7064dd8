"""What the configurations of all language models answer alike: their batches, and what of the FLOPs is attention."""

from typing import ClassVar

from titan.core.config.validate import ConfigError
from titan.models.family import BatchTensor

IGNORED_LABEL = -100
"""The label of tokens that the loss does not count; PyTorch's default for `ignore_index`."""


class DecoderFamily:
    """Base of the configuration of a decoder that is trained on packed rows of tokens.

    Attributes:
      vocab_size: number of token ids.
      max_sequence_length: the longest row that the model is meant for, in tokens.
    """

    loss_module: ClassVar[str] = "cross_entropy"
    vocab_size: int
    max_sequence_length: int

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
