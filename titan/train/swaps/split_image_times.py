"""The times of images whose tokens are split over devices."""

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from titan.models.layers.image_times import ImageTimes
from titan.parallel.collectives import maximum
from titan.parallel.mesh_axis import MeshAxis


@dataclasses.dataclass(frozen=True)
class SplitImageTimesConfig:
    """Configuration of `SplitImageTimes`.

    Attributes:
      axis: the mesh axis that splits rows.
    """

    axis: str

    def build(self) -> "SplitImageTimes":
        """The module, which has no parameters; it runs on a mesh with that axis alone."""
        return SplitImageTimes(self)


class SplitImageTimes(ImageTimes):
    """`ImageTimes` where each device has some tokens of each image, or none."""

    def __init__(self, config: SplitImageTimesConfig):
        super().__init__()
        self.config = config

    def bind_axes(self, axes: Mapping[str, MeshAxis]) -> None:
        """Takes the axes of the mesh that it runs on."""
        self._axis = axes[self.config.axis]

    def forward(self, timestep_BI: Tensor, segment_ids_BI: Tensor, num_images: int) -> Tensor:
        """As `ImageTimes.forward`, of this device's tokens; the result is the same on all devices."""
        return maximum(super().forward(timestep_BI, segment_ids_BI, num_images), self._axis)
