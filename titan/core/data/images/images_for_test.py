"""A picture's file, encoders whose results are easily told, and the shapes of rows, for the tests of this folder."""

import io
from collections.abc import Sequence

import numpy as np
import PIL.Image

from titan.core.data.images.encoders import EncodedCaption, Encoders

CHANNELS, TEXT_DIM, POOLED_DIM = 4, 3, 2


class TellingEncoders(Encoders):
    """A token of a picture is the patch's mean brightness; one of a caption is a byte; both in every element.

    Attributes:
      num_pictures: encoded so far.
    """

    fingerprint = "telling"

    def __init__(self):
        self.num_pictures = 0

    def encode_picture(self, pixels: np.ndarray) -> np.ndarray:
        self.num_pictures += 1
        height, width, _ = pixels.shape
        means = pixels.reshape(height // 16, 16, width // 16, 16, 3).mean((1, 3, 4)) / 255
        return np.repeat(means.reshape(-1, 1), CHANNELS, 1).astype(np.float32)

    def decode_picture(self, tokens: np.ndarray, *, rows: int, columns: int) -> np.ndarray:
        return np.kron(tokens[:, 0].reshape(rows, columns, 1) * 255, np.ones((16, 16, 3))).astype(np.uint8)

    def encode_captions(self, captions: Sequence[str]) -> list[EncodedCaption]:
        encoded = []
        for caption in captions:
            codes = np.array([*caption.encode(), 0], np.float32)
            encoded.append(
                EncodedCaption(np.repeat(codes[:, None], TEXT_DIM, 1), np.full(POOLED_DIM, len(caption), np.float32))
            )
        return encoded


def png(width: int, height: int, grey: int) -> bytes:
    """A picture of one colour."""
    content = io.BytesIO()
    PIL.Image.new("RGB", (width, height), (grey, grey, grey)).save(content, "PNG")
    return content.getvalue()


_TEXT_LENGTH = 30


def shapes(num_pictures: int = 2, image_length: int = 32) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a row."""
    return {
        "latents": (image_length, CHANNELS),
        "noise": (image_length, CHANNELS),
        "timestep": (image_length,),
        "image_positions": (image_length, 3),
        "image_segment_ids": (image_length,),
        "text": (_TEXT_LENGTH, TEXT_DIM),
        "text_segment_ids": (_TEXT_LENGTH,),
        "pooled": (num_pictures, POOLED_DIM),
        "guidance": (num_pictures,),
    }
