"""Context parallelism: where the tokens of a sequence lie along a mesh axis, and all of them from each device's part.

With n devices a sequence is 2n chunks, of which device r has the chunks r and 2n - 1 - r. A causal query sees all
earlier tokens, so that one of these chunks has as much more to see than the mean as the other has less: every device
has the same work. Tokens that all see one another need no such order: each device has an equal part of them.
"""

import torch
from torch import Tensor

from titan.parallel.collectives import gather_to_parts
from titan.parallel.mesh_axis import MeshAxis
from titan.parallel.trace_mark import traced_as

CHUNKS_PER_DEVICE = 2

_MARK = "token_gather"  # on ops whose results are as large as the whole sequence


def chunk_order(num_devices: int) -> tuple[int, ...]:
    """The chunks of a sequence as they lie along the axis: those of device 0, those of device 1 and so on."""
    return tuple(chunk for rank in range(num_devices) for chunk in (rank, 2 * num_devices - 1 - rank))


def chunk_starts(axis: MeshAxis, num_tokens: int) -> Tensor:
    """The index within its sequence of the first token of each of this device's chunks, int32 [2].

    Args:
      axis: along which sequences are split.
      num_tokens: of a sequence, on this device.
    """
    rank = axis.index()
    return torch.stack((rank, 2 * axis.size - 1 - rank)) * (num_tokens // CHUNKS_PER_DEVICE)


def gather_tokens(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """All tokens of the sequences, in their order, for work of which each device does a part.

    The gradient is the sum over the axis of all devices' gradients, of this device's tokens, in x's dtype.

    Args:
      x: this device's tokens.
      axis: along which sequences are split.
      dim: of x, along which its tokens lie.
    """
    with traced_as(_MARK):
        by_device = gather_to_parts(x.unsqueeze(0), axis, 0)  # [device, ...]
        first, second = by_device.unflatten(dim + 1, (CHUNKS_PER_DEVICE, -1)).unbind(dim + 1)
        chunks = torch.cat((first, second.flip(0)))  # [chunk, ...]
        return chunks.movedim(0, dim).flatten(dim, dim + 1)


def gather_set(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """As `gather_tokens` for tokens of which each device has a part in no order: first those of device 0, and so on."""
    with traced_as(_MARK):
        return gather_to_parts(x, axis, dim)
