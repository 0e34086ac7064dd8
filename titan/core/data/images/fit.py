"""An image's file to pixels of the size at which it is trained on."""

import io
import math
from typing import TYPE_CHECKING

import numpy as np

from titan.core.config.validate import ConfigError
from titan.core.data.images.source import Image

if TYPE_CHECKING:
    import PIL.Image


def decode(image: Image) -> "PIL.Image.Image":
    """The pixels as RGB, upright as the file's EXIF orientation has them; what is transparent is white.

    Raises:
      ConfigError: the file is no image, or is damaged, or its pixels are no whole numbers of up to 16 bits.
    """
    import PIL.Image
    import PIL.ImageOps

    try:
        with PIL.Image.open(io.BytesIO(image.content)) as opened:
            opened.load()
            pixels = PIL.ImageOps.exif_transpose(opened)
            if pixels.mode == "F" or pixels.mode.startswith("I"):
                pixels = PIL.Image.fromarray(_grey_of_16_bits(np.asarray(pixels)))
            if not pixels.has_transparency_data:
                return pixels.convert("RGB")
            white = PIL.Image.new("RGBA", pixels.size, "white")
            return PIL.Image.alpha_composite(white, pixels.convert("RGBA")).convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, PIL.Image.DecompressionBombError) as error:
        is_unknown = isinstance(error, PIL.UnidentifiedImageError)  # its text names an object in memory
        reason = "its format is not known" if is_unknown else str(error) or type(error).__name__
        raise ConfigError("data.path", f"{image.name} is no intact image ({reason})", "repair or remove it") from error


def _grey_of_16_bits(pixels: np.ndarray) -> np.ndarray:
    """The 8 high bits of grey of 16 bits, which Pillow would cut off at 255. ValueError where it is something else.

    Pillow has such a PNG or TIFF as uint16 or int32; other numbers come without the value that is white.
    """
    if pixels.dtype.kind not in "iu":
        raise ValueError("its pixels are floating-point numbers, whose range is not known")
    if pixels.min() < 0 or pixels.max() > 0xFFFF:
        raise ValueError("its pixels have more than 16 bits, of which the range is not known")
    return (pixels >> 8).astype(np.uint8)


def trained_size(
    width: int, height: int, *, resolution: int, max_aspect_ratio: float, patch_pixels: int
) -> tuple[int, int]:
    """Width and height, multiples of a patch, of about the image's form and of at most `resolution` squared pixels.

    Args:
      width, height: of the image.
      resolution: side of a square of as many pixels.
      max_aspect_ratio: bound of width to height and height to width.
      patch_pixels: side of a patch, which is one token.
    """
    ratio = min(max(width / height, 1 / max_aspect_ratio), max_aspect_ratio)
    patches = resolution // patch_pixels
    # The product of the rounded sides must not exceed the square: the longer side has what the shorter one leaves.
    shorter = max(1, round(patches * math.sqrt(min(ratio, 1 / ratio))))
    longer = max(shorter, min(round(shorter * max(ratio, 1 / ratio)), patches * patches // shorter))
    sides = (longer, shorter) if ratio >= 1 else (shorter, longer)
    return sides[0] * patch_pixels, sides[1] * patch_pixels


def fitted(image: "PIL.Image.Image", *, resolution: int, max_aspect_ratio: float, patch_pixels: int) -> np.ndarray:
    """uint8 [height, width, 3]: the image scaled to cover its `trained_size`, and cut at the edges, alike on both."""
    import PIL.Image
    import PIL.ImageOps

    size = trained_size(
        *image.size, resolution=resolution, max_aspect_ratio=max_aspect_ratio, patch_pixels=patch_pixels
    )
    return np.asarray(PIL.ImageOps.fit(image, size, PIL.Image.Resampling.LANCZOS))
