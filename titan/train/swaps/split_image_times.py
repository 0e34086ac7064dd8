"""The times of pictures whose tokens are split over devices."""

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from titan.models.flux.image_times import PictureTimes
from titan.parallel.collectives import maximum
from titan.parallel.mesh_axis import MeshAxis


@dataclasses.dataclass(frozen=True)
class SplitPictureTimesConfig:
    """Configuration of `SplitPictureTimes`.

    Attributes:
      axis: the mesh axis that splits rows.
    """

    axis: str

    def build(self) -> "SplitPictureTimes":
        """The module, which has no parameters; it runs on a mesh with that axis alone."""
        return SplitPictureTimes(self)


class SplitPictureTimes(PictureTimes):
    """`PictureTimes` where each device has some tokens of each picture, or none."""

    def __init__(self, config: SplitPictureTimesConfig):
        super().__init__()
        self.config = config

    def bind_axes(self, axes: Mapping[str, MeshAxis]) -> None:
        """Takes the axes of the mesh that it runs on."""
        self._axis = axes[self.config.axis]

    def forward(self, timestep_BI: Tensor, segment_ids_BI: Tensor, num_pictures: int) -> Tensor:
        """As `PictureTimes.forward`, of this device's tokens; the result is the same on all devices."""
        return maximum(super().forward(timestep_BI, segment_ids_BI, num_pictures), self._axis)
