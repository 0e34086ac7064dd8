"""Token embedding."""

import dataclasses

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.core.init import Initializer, Normal


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """Configuration of `Embedding`.

    Attributes:
      num_embeddings: number of token ids.
      dim: size of one embedding.
      weight_init: initial values of the weight.
    """

    num_embeddings: int
    dim: int
    weight_init: Initializer = Normal(1.0)

    def build(self) -> "Embedding":
        """The module, on the current default device."""
        return Embedding(self)


class Embedding(nn.Module):
    """A table of vectors, read by token id. Its output, the start of the residual stream, has the weight's dtype."""

    def __init__(self, config: EmbeddingConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_embeddings, config.dim, dtype=torch.float32))
        self.param_init = {"weight": config.weight_init}

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks up integer ids of any shape [...] and returns [..., dim]."""
        return F.embedding(tokens, self.weight)

    def project(self, hidden: Tensor) -> Tensor:
        """The transposed table as an output head (tied embeddings): [..., dim] to [..., num_embeddings]."""
        weight = self.weight
        return F.linear(hidden.to(weight.dtype), weight)
