"""What an optimizer is to a training step. Imports no torch."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """How a parameter is updated.

    Attributes:
      state: names of what an optimizer keeps of each parameter, tensors of its shape and dtype that begin as zeros;
        in the run's state they are `NAME/parameter`.
      update: `(weight, grad, state, *, step, learning_rate) -> (new weight, new state)`, a pure function of
        tensors that captures into a graph. `state` are the tensors in the order of the names above. `step` is a 0-d
        float32, the number of this update, from 1; `learning_rate` is a 0-d float32. Weights are shards of any layout,
        so that an element's update may depend on elements at the same place alone.
    """

    state: tuple[str, ...]
    update: "Callable[..., tuple[Tensor, tuple[Tensor, ...]]]"
