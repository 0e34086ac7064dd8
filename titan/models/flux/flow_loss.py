"""The loss of rectified flow (Liu et al., 2022, arXiv:2209.03003): a network predicts the velocity from data to noise.

Shapes: B batch, I image tokens, C elements of a latent token.
"""

import dataclasses

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class FlowLossConfig:
    """Configuration of `FlowLoss`."""

    def build(self) -> "FlowLoss":
        """The module, which has no parameters."""
        return FlowLoss()


class FlowLoss(nn.Module):
    """The squared error of the predicted velocity, of a token the mean over its elements, summed over tokens."""

    def forward(self, prediction_BIC: Tensor, latents_BIC: Tensor, noise_BIC: Tensor, segment_ids_BI: Tensor) -> Tensor:
        """The float32 scalar sum over all tokens but padding: who knows their global number divides.

        Args:
          prediction_BIC: what the network gives, of any float dtype.
          latents_BIC: the data, float32.
          noise_BIC: the noise, float32; the target is noise - latents.
          segment_ids_BI: image of each token; 0 is padding, which does not count.
        """
        error_BIC = prediction_BIC.float() - (noise_BIC - latents_BIC)
        squared_BI = error_BIC.square().mean(-1)
        return torch.where(segment_ids_BI != 0, squared_BI, 0.0).sum()
