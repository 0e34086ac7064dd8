"""Hyperparameters of FLUX.1, as flags, and the published sizes.

The file imports no torch, so that flags are parsed and checked before torch is loaded.
"""

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError
from titan.core.registry import load
from titan.models.family import BatchTensor, ModelConfig

if TYPE_CHECKING:
    from titan.models.family import HfFormat
    from titan.models.flux.rows import PackedImages
    from titan.models.flux.transformer import FluxTransformerConfig
    from titan.parallel.parallel_plan import ParallelPlan

MLP_RATIO = 4
"""Inner dim of each feed-forward block, in units of the model dim."""

SINUSOID_DIM = 256
"""Size of the sinusoidal embedding of a timestep or a guidance scale, before its two linear layers."""

_NOT_OF_THE_WEIGHTS = (
    "text_length",
    "images_per_row",
    "attention",
    "split_projection",
    "rope",
    "qkv_unpack",
)


@dataclasses.dataclass(frozen=True)
class FluxConfig(ModelConfig):
    """Hyperparameters of a FLUX.1 transformer; the defaults are those of the debug size."""

    loss_module: ClassVar[str] = "flow_loss"
    data_kind: ClassVar[str] = "images"
    release_encoders: ClassVar[str] = "titan.train.images.release_encoders:ReleaseEncoders"
    trial_encoders: ClassVar[str] = "titan.train.images.trial_encoders:TrialEncoders"
    patch_pixels: ClassVar[int] = 16
    """The autoencoder halves an image three times, and a token is 2x2 of its latents."""

    dim: int = option(128, "Model dim: width of both residual streams.", minimum=1)
    num_double_blocks: int = option(2, "Blocks with weights of their own for text and for image.", minimum=1)
    num_single_blocks: int = option(4, "Blocks with the same weights for text and image, after those.", minimum=1)
    num_heads: int = option(4, "Number of attention heads; divides dim.", minimum=1)
    rope_dims: tuple[int, ...] = option(
        (8, 12, 12),
        "Elements of a head that RoPE rotates by each of the three positions; even, dim / num_heads in all.",
    )
    in_channels: int = option(
        64, "Elements of a latent token: latent channels times the 4 pixels of a patch.", minimum=1
    )
    text_dim: int = option(128, "Width of the text encoder's (T5's) token embeddings.", minimum=1)
    pooled_dim: int = option(64, "Width of the pooled embedding of the whole text (CLIP's).", minimum=1)
    guidance_embedding: bool = option(
        False, "Whether the guidance scale is an input, as in the guidance-distilled dev release."
    )
    text_length: int = option(64, "Text tokens of a row for each of its images, padding included.", minimum=1)
    images_per_row: int = option(1, "The most images that are packed into one row.", minimum=1)
    attention: str = option(
        "math",
        "Inner attention: math is explicit matmul and softmax, sdpa is PyTorch's scaled_dot_product_attention.",
        choices=("math", "sdpa"),
    )
    split_projection: bool = option(
        True, "Single blocks: two linears for queries, keys, values and for the feed-forward, in place of a fused one."
    )
    rope: str = option(
        "elementwise",
        "RoPE: elementwise multiplies by cosines and sines, matrix by a 2x2 matrix per pair, as in the release.",
        choices=("elementwise", "matrix"),
    )
    qkv_unpack: str = option(
        "view",
        "Queries, keys and values out of their one projection: by a view, or by a permuted copy, as in the release.",
        choices=("view", "permute"),
    )

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.dim // self.num_heads

    @property
    def num_layers(self) -> int:
        """Blocks of both kinds; each has one attention."""
        return self.num_double_blocks + self.num_single_blocks

    def validate(self) -> None:
        """Raises ConfigError where hyperparameters that are each admitted contradict one another."""
        if self.dim % self.num_heads:
            raise ConfigError(
                "model.num_heads", f"{self.num_heads} does not divide model.dim={self.dim}", "give a divisor of it"
            )
        if len(self.rope_dims) != 3 or any(size < 2 or size % 2 for size in self.rope_dims):
            raise ConfigError(
                "model.rope_dims",
                f"{','.join(map(str, self.rope_dims))} are not three positive even sizes",
                "give one for each position, e.g. 16,56,56",
            )
        if sum(self.rope_dims) != self.head_dim:
            raise ConfigError(
                "model.rope_dims",
                f"{','.join(map(str, self.rope_dims))} add up to {sum(self.rope_dims)}, a head has {self.head_dim} "
                "elements (model.dim / model.num_heads)",
                "give sizes that add up to it",
            )

    def components(self) -> "FluxTransformerConfig":
        """The component tree; call `build()` on it, or on what rewriting makes of it. Imports torch."""
        return load("titan.models.flux.components:flux_components")(self)

    def tensor_parallel_plan(self) -> "ParallelPlan":
        """How tensor parallelism splits the model."""
        from titan.models.flux.parallel_plan import flux_plan

        return flux_plan(mlp_ratio=MLP_RATIO)

    def check_context_parallel(self, sequence_length: int, num_devices: int) -> None:
        """Raises ConfigError where text and images of a row of so many tokens cannot both be split over devices."""
        image_length = self.image_length(sequence_length)
        if self.images_per_row * self.text_length % num_devices:
            raise ConfigError(
                "model.text_length",
                f"{self.images_per_row} x {self.text_length} tokens of text cannot be split over "
                f"context_parallel={num_devices}",
                f"give a multiple of {num_devices}",
            )
        if image_length % num_devices:
            raise ConfigError(
                "training.sequence_length",
                f"the {image_length} of {sequence_length} tokens that are for images cannot be split over "
                f"context_parallel={num_devices}",
                f"give {sequence_length + -image_length % num_devices}",
            )

    def takes_rope_kernel(self) -> bool:
        """Whether RoPE is by cosines and sines rather than by 2x2 matrices."""
        return self.rope != "matrix"

    def images(self) -> "FluxConfig":
        """How images are taken in: a `titan.models.family.ImageModel`."""
        return self

    def rows(
        self, store: Any, numbers: Any, sequence_length: int, *, seed: int, caption_dropout: float, guidance: float
    ) -> "PackedImages":
        """See `titan.models.family.ImageModel.rows`."""
        from titan.models.flux.rows import PackedImages

        shapes = {tensor.name: tensor.shape for tensor in self.batch_tensors(sequence_length)}
        return PackedImages(store, numbers, shapes, seed=seed, caption_dropout=caption_dropout, guidance=guidance)

    def fill_prediction(self, rows: Any, row: int, caption: Any, grid: Any, guidance: float) -> None:
        """See `titan.models.family.ImageModel.fill_prediction`."""
        from titan.models.flux.rows import fill_prediction

        fill_prediction(rows, row, caption, grid, guidance)

    def hf(self) -> "HfFormat":
        """Weights and hyperparameters in the format of Diffusers' FluxTransformer2DModel. Imports torch."""
        return importlib.import_module("titan.models.flux.hf")

    def image_length(self, sequence_length: int) -> int:
        """Image tokens of a row of `sequence_length` tokens; an image of 1024x1024 pixels has 4096.

        Raises:
          ConfigError: the text alone fills such a row.
        """
        text_length = self.images_per_row * self.text_length
        if sequence_length <= text_length:
            raise ConfigError(
                "training.sequence_length",
                f"{sequence_length} leaves nothing for images beside {text_length} text tokens "
                "(model.images_per_row times model.text_length)",
                "give more, e.g. 4608 for 1024x1024 pixels with 512 text tokens",
            )
        return sequence_length - text_length

    def batch_tensors(self, sequence_length: int) -> tuple[BatchTensor, ...]:
        """The tensors of a batch; see `FluxTransformer.loss`. Of `sequence_length` tokens the text has its share.

        Raises:
          ConfigError: the text alone fills such a row.
        """
        image_length, num_images = self.image_length(sequence_length), self.images_per_row
        text_length = num_images * self.text_length
        of_image, of_text, per_image = (image_length,), (text_length,), (num_images,)
        guidance = (BatchTensor("guidance", "float32", per_image, tokens=""),) if self.guidance_embedding else ()
        return (
            BatchTensor("latents", "float32", (*of_image, self.in_channels), tokens="set"),
            BatchTensor("noise", "float32", (*of_image, self.in_channels), tokens="set"),
            BatchTensor("timestep", "float32", of_image, tokens="set"),
            BatchTensor("image_positions", "int32", (*of_image, 3), tokens="set"),
            BatchTensor("image_segment_ids", "int32", of_image, ignored=0, tokens="set"),
            BatchTensor("text", "float32", (*of_text, self.text_dim), tokens="set"),
            BatchTensor("text_segment_ids", "int32", of_text, tokens="set"),
            BatchTensor("pooled", "float32", (*per_image, self.pooled_dim), tokens=""),
            *guidance,
        )

    def prediction_tensors(self, sequence_length: int) -> tuple[BatchTensor, ...]:
        """The tensors that the model's `forward` takes, in order; shapes as in `batch_tensors`."""
        noised, _, timestep, *others = self.batch_tensors(sequence_length)
        return (
            dataclasses.replace(noised, name="noised"),
            dataclasses.replace(timestep, shape=(self.images_per_row,), tokens=""),
            *others,
        )

    def weight_fields(self) -> dict[str, Any]:
        """The hyperparameters that belong to a set of weights, by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if name not in _NOT_OF_THE_WEIGHTS}

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs of a row of full length over all its tokens; see `flops_per_image`."""
        image_length = self.image_length(sequence_length) / self.images_per_row
        return self.flops_per_image(image_length) * self.images_per_row / sequence_length

    def attention_flops_per_token(self, sequence_length: int) -> float:
        """The part of the products of queries, keys and values: a token sees all tokens of its image and its text."""
        return 12.0 * self.num_layers * self.dim * sequence_length / self.images_per_row

    def flops_per_image(self, image_length: float) -> float:
        """Model FLOPs of a training step per image: matrix products forward and backward, two FLOPs per multiply-add.

        Backward counts twice the forward. Attention is not causal and counts in full. Text counts with all
        `text_length` tokens, whether or not they are padding. Element-wise work and recompute are not counted. (The
        step times and MFU published for 1024x1024 pixels give 202 TFLOPs an image, which is this count, 223, with
        attention at half as if it were causal.)

        Args:
          image_length: tokens of the image.
        """
        dim, length = self.dim, image_length + self.text_length
        block_weights = (4 + 2 * MLP_RATIO) * dim * dim  # a token meets as many in a double block as in a single one
        embedders = (2 if self.guidance_embedding else 1) * (SINUSOID_DIM + dim) + self.pooled_dim + dim
        modulation = (12 * self.num_double_blocks + 3 * self.num_single_blocks + 2) * dim
        multiply_adds = (
            length * self.num_layers * (block_weights + 2 * dim * length)
            + 2 * image_length * self.in_channels * dim
            + self.text_length * self.text_dim * dim
            + dim * (embedders + modulation)
        )
        return 6.0 * multiply_adds


def flux_debug() -> FluxConfig:
    """2.3M parameters, for tests and trial runs on CPUs."""
    return FluxConfig()


def flux_dev() -> FluxConfig:
    """FLUX.1-dev: 11.90B parameters, of which the guidance embedder has 10.2M."""
    return _published(text_length=512, guidance_embedding=True)


def flux_schnell() -> FluxConfig:
    """FLUX.1-schnell: 11.89B parameters, the same without guidance, for texts of up to 256 tokens."""
    return _published(text_length=256, guidance_embedding=False)


def _published(*, text_length: int, guidance_embedding: bool) -> FluxConfig:
    return FluxConfig(
        dim=3072,
        num_double_blocks=19,
        num_single_blocks=38,
        num_heads=24,
        rope_dims=(16, 56, 56),
        text_dim=4096,
        pooled_dim=768,
        guidance_embedding=guidance_embedding,
        text_length=text_length,
    )
