"""Flags of pictures with captions. Imports nothing heavy: flags are parsed before any picture is opened."""

import dataclasses

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError, check_exists, check_writable_folder

PATCH_PIXELS = 16
"""Pixels of a side of what becomes one token: the autoencoder halves a picture three times, and a patch is 2x2."""


@dataclasses.dataclass(frozen=True)
class ImageDataConfig:
    """Where pictures and captions come from, what encodes them, and in which order they are read."""

    path: str = option(
        "",
        "Folder of pictures, webdataset tar, Parquet file, or a folder of tars or of Parquet files. Empty: the "
        "pictures that scikit-image and scikit-learn ship, with captions from their names.",
    )
    caption_extension: str = option(
        "txt",
        "Ending of the file with a picture's caption, which beside it in the folder or tar has the same name else. "
        "Empty: the name is the caption.",
    )
    image_column: str = option("image", "Column of a Parquet file with pictures: their bytes, or a struct with these.")
    caption_column: str = option("text", "Column of a Parquet file with captions.")
    resolution: int = option(
        1024,
        "A picture is scaled to about this number of pixels squared, and cut at the edges to multiples of 16.",
        minimum=PATCH_PIXELS,
    )
    max_aspect_ratio: float = option(
        2.0, "Width to height, or height to width, to which longer pictures are cut. 1: squares alone.", minimum=1.0
    )
    validation_fraction: float = option(
        0.05, "Share of the pictures held out for validation, chosen by a hash.", minimum=0.0, maximum=0.9
    )
    caption_dropout: float = option(
        0.1,
        "Share of pictures trained on with the empty caption, so that samples can be guided away from it "
        "(classifier-free guidance).",
        minimum=0.0,
        maximum=1.0,
    )
    guidance: float = option(
        1.0, "Guidance scale that a model with such an input is told of the pictures it is trained on.", minimum=0.0
    )
    shuffle_seed: int = option(
        0, "Seed of the order of the pictures, of noise, timesteps and dropout.", minimum=0, maximum=2**32 - 1
    )
    num_workers: int = option(1, "Threads that make batches ahead. 0: a batch is made when it is asked for.", minimum=0)
    max_pictures: int = option(0, "Number of pictures read, from the first one on. 0: all.", minimum=0)
    encoders: str = option(
        "",
        "Folder of a FLUX.1 release in Diffusers' layout, of which vae, text_encoder (CLIP), text_encoder_2 (T5) and "
        "their tokenizers are taken. Empty: small stand-ins that need no files, for trial runs.",
    )
    cache_folder: str = option(
        "~/.cache/titan/images", "Folder of encoded pictures and captions; may be deleted between runs."
    )

    def validate(self) -> None:
        """Raises ConfigError where pictures or encoders are not there, or the cache cannot be written."""
        if self.path:
            check_exists("data.path", self.path)
        if self.encoders:
            check_exists("data.encoders", self.encoders)
        for name in ("image_column", "caption_column"):
            if not getattr(self, name):
                raise ConfigError(f"data.{name}", "the name is empty", "name a column")
        if self.resolution % PATCH_PIXELS:
            raise ConfigError(
                "data.resolution",
                f"{self.resolution} is no multiple of {PATCH_PIXELS} pixels, which are one token",
                f"give {self.resolution // PATCH_PIXELS * PATCH_PIXELS}",
            )
        if self.caption_extension.startswith("."):
            raise ConfigError("data.caption_extension", "it begins with a dot", "leave the dot out, as txt")
        check_writable_folder("data.cache_folder", self.cache_folder)
