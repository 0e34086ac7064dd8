"""Hyperparameters of FLUX.1's autoencoder, as flags, and the published size. Imports no torch."""

import dataclasses
from typing import TYPE_CHECKING

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError

if TYPE_CHECKING:
    from titan.models.flux.autoencoder.model import Autoencoder


@dataclasses.dataclass(frozen=True)
class AutoencoderConfig:
    """Hyperparameters of an autoencoder; the defaults are those of the debug size."""

    channels: int = option(32, "Channels of the convolutions at the image's own resolution.", minimum=1)
    multipliers: tuple[int, ...] = option(
        (1, 2), "Channels at each resolution, in multiples of `channels`; each resolution after the first is halved."
    )
    num_res_blocks: int = option(1, "Residual blocks at each resolution; the decoder has one more.", minimum=1)
    latent_channels: int = option(16, "Channels of the latents.", minimum=1)
    num_groups: int = option(8, "Groups of channels in each group norm; divides `channels`.", minimum=1)
    scale: float = option(0.3611, "Factor of the latents, after the shift: brings them near unit variance.")
    shift: float = option(0.1159, "Subtracted from the latents before that.")

    @property
    def downscale(self) -> int:
        """Pixels of an image, along each side, for one of its latents."""
        return 2 ** (len(self.multipliers) - 1)

    def validate(self) -> None:
        """Raises ConfigError where hyperparameters that are each admitted contradict one another."""
        if not self.multipliers or min(self.multipliers) < 1:
            raise ConfigError(
                "autoencoder.multipliers",
                f"{','.join(map(str, self.multipliers)) or 'none'} are no positive numbers",
                "give one for each resolution, e.g. 1,2,4,4",
            )
        if self.channels % self.num_groups:
            raise ConfigError(
                "autoencoder.num_groups",
                f"{self.num_groups} does not divide {self.channels} channels",
                "give a divisor",
            )
        if not self.scale:
            raise ConfigError("autoencoder.scale", "0 would leave nothing of the latents", "give 0.3611")

    def build(self) -> "Autoencoder":
        """The model on the meta device, parameters float32, with initialisers in `param_init`. Imports torch."""
        import torch

        from titan.models.flux.autoencoder.model import Autoencoder

        with torch.device("meta"):
            return Autoencoder(self)


def flux_autoencoder() -> AutoencoderConfig:
    """The autoencoder of FLUX.1: 83.8M parameters, a latent for each 8x8 pixels."""
    return AutoencoderConfig(channels=128, multipliers=(1, 2, 4, 4), num_res_blocks=2, num_groups=32)
