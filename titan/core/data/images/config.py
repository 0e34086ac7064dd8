"""Flags of images with captions. Imports nothing heavy: flags are parsed before any image is opened."""

import dataclasses
from typing import ClassVar

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError, check_exists, check_writable_folder


@dataclasses.dataclass(frozen=True)
class ImageDataConfig:
    """Where images and captions come from, what encodes them, and in which order they are read."""

    kind: ClassVar[str] = "images"
    path: str = option(
        "",
        "Folder of images, webdataset tar, Parquet file, or a folder of tars or of Parquet files. Empty: "
        "data.trial_images.",
    )
    trial_images: str = option(
        "photographs",
        "What is read where data.path is empty. photographs: the 28 images that scikit-image and scikit-learn ship, "
        "with their names as captions. digits: the 1,797 handwritten digits of scikit-learn, 8x8 pixels each, with "
        "captions from zero to nine.",
        choices=("photographs", "digits"),
    )
    caption_extension: str = option(
        "txt",
        "Ending of the file with an image's caption, which beside it in the folder or tar has the same name else. "
        "Empty: the name is the caption.",
    )
    image_column: str = option("image", "Column of a Parquet file with images: their bytes, or a struct with these.")
    caption_column: str = option("text", "Column of a Parquet file with captions.")
    resolution: int = option(
        1024,
        "An image is scaled to about this number of pixels squared, and cut at the edges to multiples of the model's "
        "patches (16 for FLUX.1).",
        minimum=1,
    )
    max_aspect_ratio: float = option(
        2.0, "Width to height, or height to width, to which longer images are cut. 1: squares alone.", minimum=1.0
    )
    validation_fraction: float = option(
        0.05, "Share of the images held out for validation, chosen by a hash.", minimum=0.0, maximum=0.9
    )
    caption_dropout: float = option(
        0.1,
        "Share of images trained on with the empty caption, so that samples can be guided away from it "
        "(classifier-free guidance).",
        minimum=0.0,
        maximum=1.0,
    )
    guidance: float = option(
        1.0, "Guidance scale that a model with such an input is given for the images it is trained on.", minimum=0.0
    )
    shuffle_seed: int = option(
        0, "Seed of the order of the images, of noise, timesteps and dropout.", minimum=0, maximum=2**32 - 1
    )
    num_workers: int = option(1, "Threads that make batches ahead. 0: a batch is made when it is asked for.", minimum=0)
    max_images: int = option(0, "Number of images read, from the first one on. 0: all.", minimum=0)
    encoders: str = option(
        "",
        "Folder of a FLUX.1 release in Diffusers' layout, of which vae, text_encoder (CLIP), text_encoder_2 (T5) and "
        "their tokenizers are taken. Empty: small stand-ins that need no files, for trial runs.",
    )
    cache_folder: str = option(
        "~/.cache/titan/pictures", "Folder of encoded images and captions; may be deleted between runs."
    )

    def validate(self) -> None:
        """Raises ConfigError where images or encoders are not there, or the cache cannot be written."""
        if self.path:
            check_exists("data.path", self.path)
        if self.encoders:
            check_exists("data.encoders", self.encoders)
        for name in ("image_column", "caption_column"):
            if not getattr(self, name):
                raise ConfigError(f"data.{name}", "the name is empty", "name a column")
        if self.caption_extension.startswith("."):
            raise ConfigError("data.caption_extension", "it begins with a dot", "leave the dot out, as txt")
        check_writable_folder("data.cache_folder", self.cache_folder)
