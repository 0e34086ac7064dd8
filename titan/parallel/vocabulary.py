"""The vocabulary split over devices: which of its entries are here, and statistics of logits put together."""

import torch
from torch import Tensor

from titan.parallel.collectives import maximum, sum_parts
from titan.parallel.mesh_axis import MeshAxis


def first_entry(axis: MeshAxis, num_entries: int) -> Tensor:
    """The first entry of this device's slice of so many: a 0-d int32 tensor."""
    return axis.index() * num_entries


def combined_statistics(logsumexp_M: Tensor, label_logit_M: Tensor, axis: MeshAxis) -> tuple[Tensor, Tensor]:
    """The logsumexp of all logits of each token, and its label's logit, from those of each device's slice.

    Two all-reduces: of the largest, and of the sums, which are taken relative to it.

    Args:
      logsumexp_M: of the logits of this device's entries, float32 [M].
      label_logit_M: float32 [M]; 0 where the label is an entry of another device.
      axis: along which the vocabulary is split.

    Returns:
      Both, whole: float32 [M], equal on all devices. Their gradients are whole too, those of the arguments the slice's.
    """
    largest_M = maximum(logsumexp_M, axis)
    sums = sum_parts(torch.stack((torch.exp(logsumexp_M - largest_M), label_logit_M)), axis)
    return largest_M + sums[0].log(), sums[1]
