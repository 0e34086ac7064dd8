"""`titan::barrier`: tensors pass through it together, so that nothing after it begins before all of them are there.

A compiler neither merges what is computed after it with the same computation before it, nor moves the one before the
other: this is what keeps recomputation from being optimised away. It computes nothing.
"""

import torch


@torch.library.custom_op("titan::barrier", mutates_args=())
def barrier(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors."""
    return [tensor.clone() for tensor in tensors]  # an op may not return what it was given


@barrier.register_fake
def _(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]
