"""What a program may ask of any model family: its configuration's methods, and its weights in Hugging Face's format.

A family's configuration class derives from `ModelConfig`. What only some families have (experts, images, weights of
Hugging Face, a plan for tensor parallelism) are its methods that return None unless a family says otherwise: programs
ask these, and never which family it is.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from titan.core.config.tree import OpenNode
from titan.core.config.validate import ConfigError
from titan.core.registry import Registry
from titan.models.registry import FAMILIES

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from titan.parallel.parallel_plan import ParallelPlan


@dataclasses.dataclass(frozen=True)
class BatchTensor:
    """One tensor of a training batch.

    Attributes:
      name: its key in the batch.
      dtype: "int32" or "float32".
      shape: the shape of one row; a batch has it behind [microbatch, row].
      ignored: the value of this tensor's elements that the loss does not count. None: not this tensor tells which
        elements count. In each batch exactly one tensor does.
      tokens: what the first dim of a row is. "sequence": tokens, each of which sees those before it; "set": tokens that
        see one another; "": not tokens.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ignored: int | None = None
    tokens: str = "sequence"


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixtures of experts of a model.

    Attributes:
      num_mixtures: layers with a mixture.
      num_experts: experts in each of them.
      num_active: experts that a token goes to in each of them.
    """

    num_mixtures: int
    num_experts: int
    num_active: int


class ModelConfig(OpenNode):
    """The hyperparameters of one model: base of frozen dataclasses whose fields are the flags `--model.*`.

    Attributes:
      loss_module: name of the model's submodule that computes the loss from what the network gives.
      data_kind: what the model is trained on: "documents", or "images" with captions.
      dim: width of the residual stream.
      num_layers: layers of that width.
    """

    registry: ClassVar[Registry[type]] = FAMILIES
    loss_module: ClassVar[str]
    data_kind: ClassVar[str] = "documents"
    dim: int
    num_layers: int

    @property
    def family(self) -> str:
        """What messages call the family."""
        return type(self).__name__.removesuffix("Config")

    def validate(self) -> None:
        """Raises ConfigError where hyperparameters contradict one another."""

    def components(self) -> Any:
        """The tree of component configurations, with a method `build()` that makes the model on the meta device."""
        raise NotImplementedError(f"{type(self).__qualname__} has no components()")

    def batch_tensors(self, sequence_length: int) -> tuple[BatchTensor, ...]:
        """The tensors of a batch, in the order in which the model's `loss` takes them.

        Args:
          sequence_length: tokens of one packed row, of all kinds together.

        Raises:
          ConfigError: the model cannot be trained on rows of that length.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has no batch_tensors()")

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs that the model needs per trained token, forward and backward, without recompute."""
        raise NotImplementedError(f"{type(self).__qualname__} has no flops_per_token()")

    def attention_flops_per_token(self, sequence_length: int) -> float:
        """Those of `flops_per_token` that are products of queries, keys and values, in all layers together."""
        raise NotImplementedError(f"{type(self).__qualname__} has no attention_flops_per_token()")

    def weight_fields(self) -> dict[str, Any]:
        """The hyperparameters that belong to a set of weights, by the name of the field."""
        raise NotImplementedError(f"{type(self).__qualname__} has no weight_fields()")

    def check_context_parallel(self, sequence_length: int, num_devices: int) -> None:
        """Raises ConfigError where sequences cannot be split over so many devices: always, unless a family says how."""
        raise ConfigError(
            "parallelism.context_parallel", f"there is no way to split sequences of a {self.family}", "leave it at 1"
        )

    def num_token_ids(self) -> int | None:
        """Size of the vocabulary; None for a model that reads no token ids."""
        return None

    def experts(self) -> Experts | None:
        """The mixtures of experts; None for a dense model."""
        return None

    def prediction_tensors(self, sequence_length: int) -> tuple[BatchTensor, ...]:
        """The tensors that the model's `forward` takes when a run samples from it; none if it cannot."""
        return ()

    def images(self) -> "ImageModel | None":
        """How the model takes images in; None for a model of documents."""
        return None

    def takes_rope_kernel(self) -> bool:
        """Whether rotary embeddings are by cosines and sines, which is what the RoPE kernel takes."""
        return True

    def tensor_parallel_plan(self) -> "ParallelPlan | None":
        """How tensor parallelism splits the model; None for one that cannot be split."""
        return None

    def hf(self) -> "HfFormat | None":
        """The family's reader and writer of Hugging Face folders; None if it has none."""
        return None


class ImageModel(Protocol):
    """How a model of images takes them in: the sizes that encoders must have, and what a row consists of.

    Attributes:
      release_encoders: "package.module:Class" of the `titan.core.data.images.encoders.Encoders` of a release, made of
        (folder, model, cache_folder=).
      trial_encoders: the same of stand-ins that need no files, made of (model).
      patch_pixels: pixels of a side of what becomes one token.
      in_channels: elements of a latent token.
      text_length: text tokens of an image, padding included.
      text_dim: elements of the embedding of a text token.
      pooled_dim: elements of the embedding of a whole caption.
      images_per_row: the most images that are packed into one row.
      guidance_embedding: whether the guidance scale is an input.
    """

    release_encoders: str
    trial_encoders: str
    patch_pixels: int
    in_channels: int
    text_length: int
    text_dim: int
    pooled_dim: int
    images_per_row: int
    guidance_embedding: bool

    def image_length(self, sequence_length: int) -> int:
        """Tokens of a row that are for images. ConfigError: none are."""

    def rows(
        self,
        store: Any,
        numbers: "np.ndarray",
        sequence_length: int,
        *,
        seed: int,
        caption_dropout: float,
        guidance: float,
    ) -> Any:
        """Rows of chosen images, a `titan.core.data.images.loader.ImageRows`.

        Args:
          store: encoded images, a `titan.core.data.images.image_store.ImageStore`.
          numbers: the chosen ones, in order.
          sequence_length: tokens of a row.
          seed: of noise, times and dropout.
          caption_dropout: share of images that get the empty caption.
          guidance: guidance scale, for a model with such an input.
        """

    def fill_prediction(
        self, rows: Mapping[str, "np.ndarray"], row: int, caption: Any, grid: Sequence[int], guidance: float
    ) -> None:
        """Writes into a row of the prediction tensors all that does not change while an image is sampled.

        Args:
          rows: zeros, by the name of the tensor; [rows, ...].
          row: the row to write.
          caption: a `titan.core.data.images.encoders.EncodedCaption`.
          grid: rows and columns of the image's patches.
          guidance: guidance scale, for a model with such an input.
        """


class HfFormat(Protocol):
    """Hugging Face folders of one family. Every function raises HfCheckpointError for a folder that does not fit."""

    def config_from_hf(self, folder: str) -> ModelConfig:
        """The hyperparameters that the folder's config.json describes."""

    def load_hf(self, folder: str, model_config: ModelConfig) -> dict[str, "Tensor"]:
        """The state dict of the model, on the CPU, in the files' dtype."""

    def save_hf(self, state_dict: Mapping[str, "Tensor"], model_config: ModelConfig, folder: str) -> None:
        """Writes a folder that `transformers` or `diffusers`, whichever has the model, and `load_hf` read."""
