"""What a batch of a model consists of, as data: its configuration declares it, and the trainer builds the step by it.

Imports no torch, as the files of hyperparameters.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class BatchTensor:
    """One tensor of a batch.

    Attributes:
      name: its key in the batch.
      dtype: as torch and NumPy name it, `int32` or `float32`.
      shape: of one row, without the leading dims [microbatch, row] that every tensor of a batch has.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """The tensors of a batch, and what the sum that `model.loss` gives is divided by.

    The loss of a step is the sum of all rows' losses divided by the number of counted positions in all rows, times
    `elements_per_position`.

    Attributes:
      tensors: in the order in which `model.loss` takes them.
      counted: name of the integer tensor that says which positions count.
      uncounted: its value at positions that do not count.
      elements_per_position: terms of the loss that each counted position has.
      loss_module: name of the model's submodule that computes the loss; empty where there is none.
    """

    tensors: tuple[BatchTensor, ...]
    counted: str
    uncounted: int
    elements_per_position: int = 1
    loss_module: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in order."""
        return tuple(tensor.name for tensor in self.tensors)

    def shapes(self, num_microbatches: int, num_rows: int) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor for so many microbatches of so many rows each, by name."""
        return {tensor.name: (num_microbatches, num_rows, *tensor.shape) for tensor in self.tensors}


def decoder_batch(sequence_length: int) -> BatchSpec:
    """Rows of a decoder: token ids, the label of each (-100: none), position in its document, document (0: padding)."""
    names = ("tokens", "labels", "positions", "segment_ids")
    return BatchSpec(
        tuple(BatchTensor(name, "int32", (sequence_length,)) for name in names),
        counted="labels",
        uncounted=-100,
        loss_module="cross_entropy",
    )
