"""An image's file, encoders whose results are easily told, and the shapes of rows, for the tests of this folder."""

import io
import pathlib
from collections.abc import Sequence

import numpy as np
import PIL.Image

from titan.core.data.images.config import ImageDataConfig
from titan.core.data.images.encoders import EncodedCaption, Encoders

CHANNELS, TEXT_DIM, POOLED_DIM = 4, 3, 2


class TellingEncoders(Encoders):
    """A token of an image is the patch's mean brightness; one of a caption is a byte; both in every element.

    Attributes:
      num_images: encoded so far.
    """

    fingerprint = "telling"
    patch_pixels = 16

    def __init__(self):
        self.num_images = 0

    def encode_image(self, pixels: np.ndarray) -> np.ndarray:
        self.num_images += 1
        height, width, _ = pixels.shape
        means = pixels.reshape(height // 16, 16, width // 16, 16, 3).mean((1, 3, 4)) / 255
        return np.repeat(means.reshape(-1, 1), CHANNELS, 1).astype(np.float32)

    def decode_image(self, tokens: np.ndarray, *, rows: int, columns: int) -> np.ndarray:
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
    """An image of one colour."""
    content = io.BytesIO()
    PIL.Image.new("RGB", (width, height), (grey, grey, grey)).save(content, "PNG")
    return content.getvalue()


def six_images(folder: pathlib.Path) -> ImageDataConfig:
    """Six images of different shapes and greys with captions, for squares of 64x64 pixels, in `folder / "files"`."""
    files = folder / "files"
    files.mkdir()
    for number, (width, height) in enumerate(((64, 64), (200, 100), (100, 200), (30, 30), (640, 100), (65, 63))):
        (files / f"p{number}.png").write_bytes(png(width, height, 40 * number))
        (files / f"p{number}.txt").write_text(f"caption {number}\n")
    return ImageDataConfig(path=str(files), resolution=64, cache_folder=str(folder / "cache"))


class OneImageRows:
    """Rows of one image each: its latents, noise that the row's position draws, and which tokens are the image's."""

    def __init__(self, store, numbers: np.ndarray, *, seed: int, caption_dropout: float, guidance: float):
        self.numbers = numbers
        self._store, self._seed = store, seed
        self.options = {"caption_dropout": caption_dropout, "guidance": guidance}

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, number: int, position: int) -> dict[str, np.ndarray]:
        row = {name: array[0] for name, array in self.padding(1).items()}
        latents = self._store[self.numbers[number]].latents
        row["latents"][: len(latents)] = latents
        row["noise"][:] = np.random.RandomState([self._seed, position]).standard_normal(row["noise"].shape)
        row["image_segment_ids"][: len(latents)] = 1
        return row

    def padding(self, num_rows: int) -> dict[str, np.ndarray]:
        tokens = np.zeros((num_rows, 16, CHANNELS), np.float32)
        return {"latents": tokens, "noise": tokens.copy(), "image_segment_ids": np.zeros((num_rows, 16), np.int32)}


_TEXT_LENGTH = 30


def shapes(num_images: int = 2, image_length: int = 32) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a row."""
    return {
        "latents": (image_length, CHANNELS),
        "noise": (image_length, CHANNELS),
        "timestep": (image_length,),
        "image_positions": (image_length, 3),
        "image_segment_ids": (image_length,),
        "text": (_TEXT_LENGTH, TEXT_DIM),
        "text_segment_ids": (_TEXT_LENGTH,),
        "pooled": (num_images, POOLED_DIM),
        "guidance": (num_images,),
    }
