"""The autoencoder of FLUX.1, between images and the latents in which the transformer works.

That of latent diffusion (Rombach et al., 2022, arXiv:2112.10752) with 16 latent channels and without convolutions
between encoder, latents and decoder; the same as Diffusers' `AutoencoderKL`.

Shapes: B batch, H height and W width of images, c latent channels, h = H / downscale, w = W / downscale.
"""

import itertools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.models.flux.autoencoder.blocks import Conv2d, GroupNorm, MidBlock, ResidualBlock
from titan.models.flux.autoencoder.config import AutoencoderConfig

_COLOURS = 3
_LOG_VARIANCE_RANGE = (-30.0, 20.0)


class Down(nn.Module):
    """Residual blocks at one resolution of the encoder, and a step to the next."""

    def __init__(self, in_channels: int, out_channels: int, config: AutoencoderConfig, *, halves: bool):
        super().__init__()
        channels = [in_channels] + [out_channels] * config.num_res_blocks
        self.blocks = nn.ModuleList(ResidualBlock(a, b, config.num_groups) for a, b in itertools.pairwise(channels))
        self.downsample = Conv2d(out_channels, out_channels, stride=2) if halves else None

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, in_channels, h, w] to [B, out_channels, h, w], or to half that height and width."""
        for block in self.blocks:
            x = block(x)
        # The kernel of 3 reaches one pixel beyond the right and lower edges, not the left and upper ones.
        return x if self.downsample is None else self.downsample(F.pad(x, (0, 1, 0, 1)))


class Up(nn.Module):
    """Residual blocks at one resolution of the decoder, and a step to the next."""

    def __init__(self, in_channels: int, out_channels: int, config: AutoencoderConfig, *, doubles: bool):
        super().__init__()
        channels = [in_channels] + [out_channels] * (config.num_res_blocks + 1)
        self.blocks = nn.ModuleList(ResidualBlock(a, b, config.num_groups) for a, b in itertools.pairwise(channels))
        self.upsample = Conv2d(out_channels, out_channels) if doubles else None

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, in_channels, h, w] to [B, out_channels, h, w], or to twice that height and width."""
        for block in self.blocks:
            x = block(x)
        return x if self.upsample is None else self.upsample(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Encoder(nn.Module):
    """Images to means and logarithms of variances of latents."""

    def __init__(self, config: AutoencoderConfig):
        super().__init__()
        widths = [config.channels * multiplier for multiplier in config.multipliers]
        inputs, last = [config.channels, *widths], len(widths) - 1
        self.conv_in = Conv2d(_COLOURS, config.channels)
        self.down = nn.ModuleList(Down(inputs[i], width, config, halves=i < last) for i, width in enumerate(widths))
        self.mid = MidBlock(widths[-1], config.num_groups)
        self.norm_out = GroupNorm(widths[-1], config.num_groups)
        self.conv_out = Conv2d(widths[-1], 2 * config.latent_channels)

    def forward(self, images: Tensor) -> Tensor:
        """Maps [B, 3, H, W] to [B, 2 c, h, w]."""
        x = self.conv_in(images)
        for down in self.down:
            x = down(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """Latents to images."""

    def __init__(self, config: AutoencoderConfig):
        super().__init__()
        widths = [config.channels * multiplier for multiplier in reversed(config.multipliers)]
        inputs, last = [widths[0], *widths], len(widths) - 1
        self.conv_in = Conv2d(config.latent_channels, widths[0])
        self.mid = MidBlock(widths[0], config.num_groups)
        self.up = nn.ModuleList(Up(inputs[i], width, config, doubles=i < last) for i, width in enumerate(widths))
        self.norm_out = GroupNorm(widths[-1], config.num_groups)
        self.conv_out = Conv2d(widths[-1], _COLOURS)

    def forward(self, latents: Tensor) -> Tensor:
        """Maps [B, c, h, w] to [B, 3, H, W]."""
        x = self.mid(self.conv_in(latents))
        for up in self.up:
            x = up(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Autoencoder(nn.Module):
    """Encoder and decoder, with the shift and scale that bring latents near unit variance."""

    def __init__(self, config: AutoencoderConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def encode(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Latents [B, c, h, w] of images, shifted and scaled.

        Args:
          images: [B, 3, H, W] from -1 to 1; height and width are multiples of `config.downscale`.
          noise: standard normal [B, c, h, w], for a draw from the encoder's distribution. None: its mean.

        Raises:
          ValueError: the images' height or width is no such multiple.
        """
        height, width = images.shape[-2:]
        if height % self.config.downscale or width % self.config.downscale:
            raise ValueError(
                f"images of {height}x{width} pixels have no whole number of latents; "
                f"give multiples of {self.config.downscale}"
            )
        mean, log_variance = self.moments(images)
        latents = mean if noise is None else mean + torch.exp(0.5 * log_variance) * noise
        return (latents - self.config.shift) * self.config.scale

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the variance of the latents before shift and scale, each [B, c, h, w]."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        return mean, log_variance.clamp(*_LOG_VARIANCE_RANGE)

    def decode(self, latents: Tensor) -> Tensor:
        """Images [B, 3, H, W], of about -1 to 1, out of shifted and scaled latents [B, c, h, w]."""
        return self.decoder(latents / self.config.scale + self.config.shift)
