"""A small FLUX.1 transformer with random weights, and rows for it, which several tests share."""

import torch

from titan.models.flux.config import FluxConfig

CONFIG = FluxConfig(
    dim=64,
    num_double_blocks=2,
    num_single_blocks=2,
    num_heads=2,
    rope_dims=(8, 12, 12),
    in_channels=16,
    text_dim=24,
    pooled_dim=20,
    text_length=7,
)
"""Sizes of which no two are equal that could be taken for one another."""


def build(config: FluxConfig) -> torch.nn.Module:
    """The model with random weights, modulations and head included, on the CPU."""
    model = config.components().build()
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(p.shape, generator=generator) * 0.1 for n, p in model.named_parameters()}
    model.load_state_dict(weights, assign=True)
    return model


def image(config: FluxConfig, rows: int, columns: int, *, text_length: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch of one row with one random image and no padding."""
    generator = torch.Generator().manual_seed(seed)
    length = rows * columns

    def normal(*shape):
        return torch.randn(1, *shape, generator=generator)

    batch = {
        "latents": normal(length, config.in_channels),
        "noise": normal(length, config.in_channels),
        "timestep": torch.rand(1, 1, generator=generator).expand(1, length).clone(),
        "image_positions": patch_positions(rows=rows, columns=columns).unsqueeze(0),
        "image_segment_ids": torch.ones(1, length, dtype=torch.int32),
        "text": normal(text_length, config.text_dim),
        "text_segment_ids": torch.ones(1, text_length, dtype=torch.int32),
        "pooled": normal(1, config.pooled_dim),
    }
    if config.guidance_embedding:
        batch["guidance"] = 1.0 + 3.0 * torch.rand(1, 1, generator=generator)
    return batch


def packed(images: list[dict[str, torch.Tensor]], *, image_padding: int, text_padding: int) -> dict[str, torch.Tensor]:
    """The images of several rows in one row, with padding, full of junk, at the ends of image and text tokens."""
    batch = {}
    for name in images[0]:
        parts = [image[name] for image in images]
        if name.endswith("segment_ids"):
            parts = [part * (index + 1) for index, part in enumerate(parts)]
        if name not in ("pooled", "guidance"):
            padding = text_padding if name.startswith("text") else image_padding
            fill = 0 if name.endswith("segment_ids") else 3
            parts.append(torch.full((1, padding, *parts[0].shape[2:]), fill, dtype=parts[0].dtype))
        batch[name] = torch.cat(parts, dim=1)
    return batch


def patch_positions(*, rows: int, columns: int) -> torch.Tensor:
    """Positions (0, row, column) of the patches of an image, int32 [R S, 3]."""
    row_RS, column_RS = torch.meshgrid(
        torch.arange(rows, dtype=torch.int32), torch.arange(columns, dtype=torch.int32), indexing="ij"
    )
    return torch.stack((torch.zeros_like(row_RS), row_RS, column_RS), dim=-1).flatten(0, 1)
