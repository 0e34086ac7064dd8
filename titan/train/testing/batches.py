"""Batches for the steps of small models."""

import functools

import numpy as np

from titan.core.data.packing import IGNORED_LABEL
from titan.train.sharding.token_order import in_mesh_order
from titan.train.step.state import LEARNING_RATE
from titan.train.testing.case import Case
from titan.train.testing.models import BATCH, FLUX, LENGTH


def batch_of(case: Case) -> dict[str, np.ndarray]:
    """The batch of every step of a case, its tokens in the order of the mesh."""
    arrays = image_batch() if case.model.startswith("flux") else batch(case.microbatches)
    return in_mesh_order(arrays, case.mesh, case.config.model.batch_tensors(LENGTH))


@functools.cache
def image_batch() -> dict[str, np.ndarray]:
    """Two images of 2x2 patches in each row, with texts of two and three tokens, and padding after either."""
    random = np.random.default_rng(0)
    image_ids, text_ids = np.repeat([1, 2, 0], [4, 4, 2]), np.repeat([1, 2, 0], [2, 3, 1])
    corners = np.array([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]])
    timestep = random.random((BATCH, 3))
    arrays = {
        "latents": random.standard_normal((BATCH, 10, FLUX.in_channels)),
        "noise": random.standard_normal((BATCH, 10, FLUX.in_channels)),
        "timestep": timestep[:, image_ids],
        "image_positions": np.broadcast_to(np.concatenate((corners, corners, corners[:2])), (BATCH, 10, 3)),
        "image_segment_ids": np.broadcast_to(image_ids, (BATCH, 10)),
        "text": random.standard_normal((BATCH, 6, FLUX.text_dim)),
        "text_segment_ids": np.broadcast_to(text_ids, (BATCH, 6)),
        "pooled": random.standard_normal((BATCH, 2, FLUX.pooled_dim)),
        "guidance": 1 + random.random((BATCH, 2)),
    }
    batch = {
        tensor.name: arrays[tensor.name][None].astype(tensor.dtype, order="C") for tensor in FLUX.batch_tensors(LENGTH)
    }
    return {**batch, LEARNING_RATE: np.float32(1e-2)}


@functools.cache
def batch(microbatches: int = 1) -> dict[str, np.ndarray]:
    """Two documents in each row, in some rows padding after them; as many labels as not, and in the first row none."""
    random = np.random.default_rng(0)
    index = np.arange(LENGTH)[None]
    cut, end = random.integers(3, 8, (BATCH, 1)), random.integers(10, LENGTH + 1, (BATCH, 1))
    tokens = random.integers(0, 100, (BATCH, LENGTH))
    segment_ids = np.where(index >= end, 0, np.where(index >= cut, 2, 1))
    labels = np.where(segment_ids > 0, np.roll(tokens, -1, 1), IGNORED_LABEL)
    labels[1:4][random.random((3, LENGTH)) < 0.7] = IGNORED_LABEL
    labels[0] = IGNORED_LABEL
    arrays = {
        "tokens": tokens,
        "labels": labels,
        "positions": np.where(index >= cut, index - cut, index),
        "segment_ids": segment_ids,
    }
    parts = {name: array.astype(np.int32).reshape(microbatches, -1, LENGTH) for name, array in arrays.items()}
    return {**parts, LEARNING_RATE: np.float32(1e-2)}
