"""Latents of an autoencoder as tokens: patches of 2x2, as FLUX.1 has them (and Diffusers' `FluxPipeline`)."""

import numpy as np


def to_patches(latents_CHW: np.ndarray) -> np.ndarray:
    """[channels, height, width] to [height/2 * width/2, channels * 4]: rows of patches; in a patch the channel varies
    slowest."""
    channels, height, width = latents_CHW.shape
    patches = latents_CHW.reshape(channels, height // 2, 2, width // 2, 2).transpose(1, 3, 0, 2, 4)
    return patches.reshape(height // 2 * (width // 2), channels * 4)


def from_patches(tokens: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The inverse: [rows * columns, channels * 4] to [channels, 2 * rows, 2 * columns]."""
    channels = tokens.shape[1] // 4
    patches = tokens.reshape(rows, columns, channels, 2, 2).transpose(2, 0, 3, 1, 4)
    return patches.reshape(channels, 2 * rows, 2 * columns)
