"""The timestep of each image of a row, out of that of its tokens.

Shapes: B batch, P images of a row, I image tokens.
"""

import dataclasses

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class ImageTimesConfig:
    """Configuration of `ImageTimes`."""

    def build(self) -> "ImageTimes":
        """The module, which has no parameters."""
        return ImageTimes()


class ImageTimes(nn.Module):
    """The time of an image's tokens, which all have the same."""

    def forward(self, timestep_BI: Tensor, segment_ids_BI: Tensor, num_images: int) -> Tensor:
        """The timestep of each image, float32 [B, P]; 0 for an image that a row has not.

        Args:
          timestep_BI: from 0 to 1.
          segment_ids_BI: integer image of each token, p + 1 for the p-th; 0 is padding.
          num_images: P.
        """
        images_P = torch.arange(1, num_images + 1, device=segment_ids_BI.device, dtype=segment_ids_BI.dtype)
        is_own_BIP = segment_ids_BI.unsqueeze(-1) == images_P
        return torch.where(is_own_BIP, timestep_BI.unsqueeze(-1), 0.0).amax(1)
