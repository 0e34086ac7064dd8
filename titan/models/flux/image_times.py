"""The timestep of each picture of a row, out of that of its tokens.

Shapes: B batch, P pictures of a row, I picture tokens.
"""

import dataclasses

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class PictureTimesConfig:
    """Configuration of `PictureTimes`."""

    def build(self) -> "PictureTimes":
        """The module, which has no parameters."""
        return PictureTimes()


class PictureTimes(nn.Module):
    """The time of a picture's tokens, which all have the same."""

    def forward(self, timestep_BI: Tensor, segment_ids_BI: Tensor, num_pictures: int) -> Tensor:
        """The timestep of each picture, float32 [B, P]; 0 for a picture that a row has not.

        Args:
          timestep_BI: from 0 to 1.
          segment_ids_BI: integer picture of each token, p + 1 for the p-th; 0 is padding.
          num_pictures: P.
        """
        pictures_P = torch.arange(1, num_pictures + 1, device=segment_ids_BI.device, dtype=segment_ids_BI.dtype)
        is_own_BIP = segment_ids_BI.unsqueeze(-1) == pictures_P
        return torch.where(is_own_BIP, timestep_BI.unsqueeze(-1), 0.0).amax(1)
