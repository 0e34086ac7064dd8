"""The transformer of FLUX.1, which predicts the velocity of rectified flow for the latent patches of images.

Facts of the architecture are those of the release by Black Forest Labs and of Diffusers' `FluxTransformer2DModel`.

A batch's row is a packed sequence: the text tokens of its images, then their latent tokens. Of either, a token has
the segment id p + 1 for the p-th image of the row, or 0 where it is padding; it sees the tokens of its own segment.

Shapes: B batch, P images of a row, X text tokens, I image tokens, T = X + I, C elements of a latent token, S width
of text embeddings, K width of the pooled embedding, E model dim.
"""

import dataclasses

import torch
from torch import Tensor, nn

from titan.models.flux.double_block import DoubleBlockConfig
from titan.models.flux.embedders import EmbedderConfig, sinusoid
from titan.models.flux.flow_loss import FlowLossConfig
from titan.models.flux.modulation import ModulationConfig, modulated_norm
from titan.models.flux.rope import FluxRopeConfig
from titan.models.flux.single_block import SingleBlockConfig
from titan.models.layers.attention import SegmentMaskConfig
from titan.models.layers.image_times import ImageTimesConfig
from titan.models.layers.linear import LinearConfig


@dataclasses.dataclass(frozen=True)
class FluxTransformerConfig:
    """Configuration of `FluxTransformer`, fully spelled out; made by `FluxConfig.components()`, open to rewriting.

    A field has the name of the module's child, so that a path in the tree is the module's fully qualified name (the
    node `loss` alone has another, `flow_loss`: `loss` is a method).

    Attributes:
      image_in: linear, C to E.
      text_in: linear, S to E.
      time_in: embedder of the timestep's sinusoid.
      pooled_in: embedder of the pooled text embedding.
      guidance_in: embedder of the guidance scale's sinusoid; None: the model has no such input.
      rope: what rotates the heads of all blocks.
      mask: node whose module maps segment ids to which tokens see which.
      image_times: gives each image's timestep for the loss, where each token has one.
      double_blocks: one node per double-stream block.
      single_blocks: one node per single-stream block.
      final_modulation: gives scale and shift of the last norm.
      head: linear, E to C.
      loss: node whose module maps (prediction, latents, noise, segment ids) to the summed loss.
    """

    image_in: LinearConfig
    text_in: LinearConfig
    time_in: EmbedderConfig
    pooled_in: EmbedderConfig
    guidance_in: EmbedderConfig | None
    rope: FluxRopeConfig
    mask: SegmentMaskConfig
    image_times: ImageTimesConfig
    double_blocks: tuple[DoubleBlockConfig, ...]
    single_blocks: tuple[SingleBlockConfig, ...]
    final_modulation: ModulationConfig
    head: LinearConfig
    loss: FlowLossConfig

    def build(self) -> "FluxTransformer":
        """The model on the meta device, parameters float32, each with its initialiser in `param_init`."""
        with torch.device("meta"):
            return FluxTransformer(self)


class FluxTransformer(nn.Module):
    """Embedders, double-stream blocks, single-stream blocks, modulated norm and head.

    It has no buffers, and every constant is computed in `forward` from shapes and inputs, so that parameters are all
    there is to materialise.
    """

    def __init__(self, config: FluxTransformerConfig):
        super().__init__()
        self.sinusoid_dim = config.time_in.in_layer.in_dim
        self.image_in = config.image_in.build()
        self.text_in = config.text_in.build()
        self.time_in = config.time_in.build()
        self.pooled_in = config.pooled_in.build()
        self.guidance_in = config.guidance_in.build() if config.guidance_in is not None else None
        self.rope = config.rope.build()
        self.mask = config.mask.build()
        self.image_times = config.image_times.build()
        self.double_blocks = nn.ModuleList(block.build() for block in config.double_blocks)
        self.single_blocks = nn.ModuleList(block.build() for block in config.single_blocks)
        self.final_modulation = config.final_modulation.build()
        self.head = config.head.build()
        self.flow_loss = config.loss.build()

    def forward(
        self,
        noised_BIC: Tensor,
        timestep_BP: Tensor,
        image_positions_BI3: Tensor,
        image_segment_ids_BI: Tensor,
        text_BXS: Tensor,
        text_segment_ids_BX: Tensor,
        pooled_BPK: Tensor,
        guidance_BP: Tensor | None = None,
    ) -> Tensor:
        """The velocity [B, I, C] at a point between data and noise, in the head's dtype.

        Args:
          noised_BIC: that point, (1 - t) latents + t noise, float32.
          timestep_BP: t of each image, float32, from 0 (data) to 1 (noise).
          image_positions_BI3: integer (0, row, column) of each patch in its image.
          image_segment_ids_BI: integer image of each latent token.
          text_BXS: token embeddings of the text encoder (T5).
          text_segment_ids_BX: integer image of each text token.
          pooled_BPK: pooled text embedding (CLIP) of each image.
          guidance_BP: guidance scale of each image, float32; for a model with a guidance embedder, and for no other.
        """
        conditioning_BPE = self.time_in(sinusoid(timestep_BP, self.sinusoid_dim)) + self.pooled_in(pooled_BPK)
        if self.guidance_in is not None:
            conditioning_BPE = conditioning_BPE + self.guidance_in(sinusoid(guidance_BP, self.sinusoid_dim))
        text_length = text_BXS.shape[1]
        text_positions_BX3 = image_positions_BI3.new_zeros((*text_BXS.shape[:2], 3))
        rope = self.rope(torch.cat((text_positions_BX3, image_positions_BI3), dim=1))
        mask = self.mask(torch.cat((text_segment_ids_BX, image_segment_ids_BI), dim=1))

        streams = self.text_in(text_BXS), self.image_in(noised_BIC)
        for block in self.double_blocks:
            streams = block(streams, conditioning_BPE, rope, mask)
        x_BTE = torch.cat(streams, dim=1)
        for block in self.single_blocks:
            x_BTE = block(x_BTE, conditioning_BPE, rope, mask)
        scale, shift = self.final_modulation(conditioning_BPE, image_segment_ids_BI)
        return self.head(modulated_norm(x_BTE[:, text_length:], shift, scale))

    def loss(
        self,
        latents_BIC: Tensor,
        noise_BIC: Tensor,
        timestep_BI: Tensor,
        image_positions_BI3: Tensor,
        image_segment_ids_BI: Tensor,
        text_BXS: Tensor,
        text_segment_ids_BX: Tensor,
        pooled_BPK: Tensor,
        guidance_BP: Tensor | None = None,
    ) -> Tensor:
        """The loss of rectified flow: a float32 scalar, summed over tokens but padding (see `FlowLoss`).

        Args:
          latents_BIC: packed 2x2 patches of scaled and shifted latents, float32; padding is 0.
          noise_BIC: standard normal noise, float32.
          timestep_BI: t of each token's image, float32, from 0 (data) to 1 (noise).
          image_positions_BI3, image_segment_ids_BI, text_BXS, text_segment_ids_BX, pooled_BPK, guidance_BP: as in
            `forward`.
        """
        t_BI1 = timestep_BI.unsqueeze(-1)
        prediction_BIC = self(
            (1.0 - t_BI1) * latents_BIC + t_BI1 * noise_BIC,
            self.image_times(timestep_BI, image_segment_ids_BI, pooled_BPK.shape[1]),
            image_positions_BI3,
            image_segment_ids_BI,
            text_BXS,
            text_segment_ids_BX,
            pooled_BPK,
            guidance_BP,
        )
        return self.flow_loss(prediction_BIC, latents_BIC, noise_BIC, image_segment_ids_BI)
