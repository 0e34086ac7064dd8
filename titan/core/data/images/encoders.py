"""What makes latents of images and embeddings of captions: the interface of the encoders."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class EncodedCaption:
    """A caption as the model reads it.

    Attributes:
      tokens: float32 [num_tokens, text dim] embeddings of its tokens, none of them padding.
      pooled: float32 [pooled dim] embedding of the whole.
    """

    tokens: np.ndarray
    pooled: np.ndarray


class Encoders(Protocol):
    """An autoencoder and the text encoders.

    Attributes:
      fingerprint: differs for encoders that give something else.
      patch_pixels: pixels of a side of a token's patch.
    """

    fingerprint: str
    patch_pixels: int

    def encode_image(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [16 rows, 16 columns, 3] to its latents as tokens, float32 [rows * columns, C], of about unit variance.

        A token is a patch of 2x2 latents; its elements are ordered by channel, row, column.
        """

    def decode_image(self, tokens: np.ndarray, *, rows: int, columns: int) -> np.ndarray:
        """The inverse, as far as there is one: uint8 [16 rows, 16 columns, 3]."""

    def encode_captions(self, captions: Sequence[str]) -> list[EncodedCaption]:
        """Each caption, cut off where it has more tokens than the model takes."""
