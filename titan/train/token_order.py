"""The order in which a batch's tokens are placed on a mesh that splits sequences."""

from collections.abc import Mapping

import numpy as np

from titan.parallel.context_parallel import CHUNKS_PER_DEVICE, chunk_order
from titan.parallel.mesh import MeshSpec
from titan.train.mesh_axes import SEQUENCE_AXIS


def in_mesh_order(batch: Mapping[str, np.ndarray], mesh: MeshSpec) -> dict[str, np.ndarray]:
    """The batch with each sequence's tokens in the order of `chunk_order`; as it is where no axis splits sequences.

    Labels, positions and segment ids go with their tokens, so that no sum over tokens changes.

    Args:
      batch: whole sequences, [microbatch, row, position, ...]; what has fewer dims is left as it is.
      mesh: of the run.
    """
    num_devices = mesh.size(SEQUENCE_AXIS)
    if num_devices == 1:
        return dict(batch)
    return {name: _ordered(array, num_devices) if np.ndim(array) > 2 else array for name, array in batch.items()}


def _ordered(array: np.ndarray, num_devices: int) -> np.ndarray:
    chunks = array.reshape(*array.shape[:2], num_devices * CHUNKS_PER_DEVICE, -1, *array.shape[3:])
    return chunks[:, :, list(chunk_order(num_devices))].reshape(array.shape)
