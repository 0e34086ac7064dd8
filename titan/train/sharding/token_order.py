"""The order in which a batch's tokens are placed on a mesh that splits sequences."""

from collections.abc import Mapping, Sequence

import numpy as np

from titan.models.family import BatchTensor
from titan.parallel.context_parallel import CHUNKS_PER_DEVICE, chunk_order
from titan.parallel.mesh import MeshSpec
from titan.train.sharding.mesh_axes import SEQUENCE_AXIS


def in_mesh_order(
    batch: Mapping[str, np.ndarray], mesh: MeshSpec, tensors: Sequence[BatchTensor]
) -> dict[str, np.ndarray]:
    """The batch with each sequence's tokens in the order of `chunk_order`; as it is where no axis splits sequences.

    Sets of tokens stay in their own order: there every device has the same work with equal parts of any tokens. Labels,
    positions and segment ids go with their tokens, so that no sum over tokens changes.

    Args:
      batch: whole sequences, [microbatch, row, position, ...], and besides what is none of `tensors`.
      mesh: of the run.
      tensors: those of the model.
    """
    num_devices = mesh.size(SEQUENCE_AXIS)
    if num_devices == 1:
        return dict(batch)
    sequences = {tensor.name for tensor in tensors if tensor.tokens == "sequence"}
    return {name: _ordered(array, num_devices) if name in sequences else array for name, array in batch.items()}


def _ordered(array: np.ndarray, num_devices: int) -> np.ndarray:
    chunks = array.reshape(*array.shape[:2], num_devices * CHUNKS_PER_DEVICE, -1, *array.shape[3:])
    return chunks[:, :, list(chunk_order(num_devices))].reshape(array.shape)
