"""What makes latents of pictures and embeddings of captions: the interface of the encoders."""

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
    """

    fingerprint: str

    def encode_picture(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 [height, width, 3], multiples of 16, to latents, float32 [channels, height/8, width/8], of about unit
        variance."""

    def decode_picture(self, latents: np.ndarray) -> np.ndarray:
        """Latents to uint8 [height, width, 3]."""

    def encode_captions(self, captions: Sequence[str]) -> list[EncodedCaption]:
        """Each caption, cut off where it has more tokens than the model takes."""
