"""A vocabulary of which each device has a part, as fused linear cross-entropy sees it."""

import dataclasses
from collections.abc import Callable

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class VocabShard:
    """This device's part of a vocabulary: the entries whose rows of the weight it is given.

    The loss needs two numbers of each token's logits, the logsumexp and the label's logit. Those of the parts are
    computed by themselves, forward and backward, and put together by who knows the devices.

    Attributes:
      start: the first entry, a 0-d integer tensor or a number.
      vocab: entries of all parts together.
      combine: from logsumexp and label's logit of each token among the entries here (0 for a label that is not), both
        float32 [M], to those among all entries; differentiable.
    """

    start: Tensor | int
    vocab: int
    combine: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
