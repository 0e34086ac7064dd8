"""What the autoencoder is made of: convolutions, group norms, residual blocks, attention over pixels.

Convolutions and linears begin as in PyTorch, uniform within 1 / sqrt(fan-in), biases too.

Shapes: B batch, c channels, h height, w width.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from titan.core.init import Ones, Uniform, Zeros
from titan.models.layers.linear import Linear, LinearConfig

_EPS = 1e-6


class Conv2d(nn.Module):
    """A convolution with a bias, of which nothing is lost at the edges where the stride is 1."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3, *, stride: int = 1):
        super().__init__()
        self.stride = stride
        self.padding = kernel_size // 2 if stride == 1 else 0
        shape = (out_channels, in_channels, kernel_size, kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(out_channels, dtype=torch.float32))
        init = Uniform((in_channels * kernel_size**2) ** -0.5)
        self.param_init = {"weight": init, "bias": init}

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, in_channels, h, w] to [B, out_channels, h', w'] in the weight's dtype."""
        weight = self.weight
        return F.conv2d(x.to(weight.dtype), weight, self.bias, stride=self.stride, padding=self.padding)


class GroupNorm(nn.Module):
    """Group norm (Wu and He, 2018, arXiv:1803.08494) with weight and bias, in float32 and rounded once to x's dtype."""

    def __init__(self, channels: int, num_groups: int):
        super().__init__()
        self.num_groups = num_groups
        self.weight = nn.Parameter(torch.empty(channels, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(channels, dtype=torch.float32))
        self.param_init = {"weight": Ones(), "bias": Zeros()}

    def forward(self, x: Tensor) -> Tensor:
        """Normalises [B, c, ...]; the result has x's shape and dtype."""
        normed = F.group_norm(x.float(), self.num_groups, self.weight.float(), self.bias.float(), _EPS)
        return normed.to(x.dtype)


class ResidualBlock(nn.Module):
    """Two convolutions, each after a norm and SiLU, added to the input (or to its 1x1 convolution)."""

    def __init__(self, in_channels: int, out_channels: int, num_groups: int):
        super().__init__()
        self.norm1 = GroupNorm(in_channels, num_groups)
        self.conv1 = Conv2d(in_channels, out_channels)
        self.norm2 = GroupNorm(out_channels, num_groups)
        self.conv2 = Conv2d(out_channels, out_channels)
        self.shortcut = Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, in_channels, h, w] to [B, out_channels, h, w]."""
        inner = self.conv1(F.silu(self.norm1(x)))
        inner = self.conv2(F.silu(self.norm2(inner)))
        return inner + (x if self.shortcut is None else self.shortcut(x))


class PixelAttention(nn.Module):
    """Self-attention of all pixels with one head, after a norm, added to the input."""

    def __init__(self, channels: int, num_groups: int):
        super().__init__()
        init = Uniform(channels**-0.5)
        config = LinearConfig(channels, channels, init, bias_init=init)
        self.norm = GroupNorm(channels, num_groups)
        self.wq, self.wk, self.wv, self.wo = (Linear(config) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, c, h, w] to the same."""
        pixels = self.norm(x).flatten(2).transpose(1, 2).unsqueeze(1)  # [B, 1, h w, c]
        attended = F.scaled_dot_product_attention(self.wq(pixels), self.wk(pixels), self.wv(pixels))
        return x + self.wo(attended).squeeze(1).transpose(1, 2).unflatten(2, x.shape[2:])


class MidBlock(nn.Module):
    """Attention between two residual blocks, at the lowest resolution."""

    def __init__(self, channels: int, num_groups: int):
        super().__init__()
        self.block1 = ResidualBlock(channels, channels, num_groups)
        self.attention = PixelAttention(channels, num_groups)
        self.block2 = ResidualBlock(channels, channels, num_groups)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, c, h, w] to the same."""
        return self.block2(self.attention(self.block1(x)))
