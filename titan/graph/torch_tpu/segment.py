"""A segment of a graph as plain data, in which a process with TorchTPU is told what to lower."""

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Ref:
    """The value of this name, as an argument of an op."""

    name: str


@dataclasses.dataclass(frozen=True)
class Input:
    """A tensor from outside the segment."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
      name: of its result.
      target: `namespace.op.overload`, or "getitem".
      args, kwargs: as the op takes them, with a Ref for every tensor.
      scope: region and module, joined by "/"; what the compiled program names the op's instructions after.
      description: for messages.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scope: str
    description: str


@dataclasses.dataclass(frozen=True)
class Segment:
    """A function of tensors.

    Attributes:
      inputs: its arguments.
      constants: tensors with values, by name.
      ops: in order.
      outputs: names of its results, none of them an input.
    """

    inputs: tuple[Input, ...]
    constants: dict[str, torch.Tensor]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
