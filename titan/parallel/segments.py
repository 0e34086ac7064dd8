"""Weights of which one dim is several equal segments, each of them split over devices.

The rows of one projection to queries, keys and values are such a dim: a device's heads are a slice of each of the three
segments, and no slice of the dim. Cut, the weight is a stack of its segments, of which a device has a slice as of any
other tensor.
"""

import dataclasses
import math
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of a weight. Arrays are of PyTorch, NumPy or JAX.

    Attributes:
      dim: that consists of them.
      count: how many there are.
    """

    dim: int
    count: int

    def cut_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stack of segments.

        Raises:
          ValueError: the dim cannot be cut into so many.
        """
        if shape[self.dim] % self.count:
            raise ValueError(f"dim {self.dim} of a weight of shape {shape} is not {self.count} equal segments")
        return self.count, *shape[: self.dim], shape[self.dim] // self.count, *shape[self.dim + 1 :]

    def joined_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the weight, or of a slice of it, from that of its stack of segments."""
        before, size, after = shape[1 : self.dim + 1], shape[self.dim + 1], shape[self.dim + 2 :]
        return *before, self.count * size, *after

    def cut(self, weight: T) -> T:
        """The stack of segments, [count, ...], of a weight or of a device's slice of it."""
        shape = self.cut_shape(tuple(weight.shape))
        return weight.reshape(math.prod(shape[1 : self.dim + 1]), self.count, -1).swapaxes(0, 1).reshape(shape)

    def joined(self, stack: T) -> T:
        """The inverse of `cut`."""
        shape = tuple(stack.shape)
        rows = stack.reshape(self.count, math.prod(shape[1 : self.dim + 1]), -1).swapaxes(0, 1)
        return rows.reshape(self.joined_shape(shape))
