"""Rotary embedding: angles in closed form, the relative property, and what scaling keeps and stretches."""

import math

import pytest
import torch

from titan.models.layers.rope import Llama3RopeScaling, RopeConfig, apply_rope


@pytest.mark.parametrize("adjacent_pairs, pairs", [(False, ((0, 3), (1, 4), (2, 5))), (True, ((0, 1), (2, 3), (4, 5)))])
def test_rotates_the_pairs_of_the_layout_by_the_published_angles(adjacent_pairs, pairs):
    config = RopeConfig(head_dim=6, theta=100.0)
    positions = torch.tensor([[0, 1, 7]], dtype=torch.int32)
    x = torch.randn(1, 2, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    rotated = apply_rope(x, *config.build()(positions), adjacent_pairs=adjacent_pairs)
    for index, position in enumerate((0, 1, 7)):
        for number, pair in enumerate(pairs):
            angle = position * 100.0 ** (-2 * number / 6)
            turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
            torch.testing.assert_close(rotated[0, :, index, list(pair)], x[0, :, index, list(pair)] @ turn.T)


def test_scores_depend_on_distance_alone():
    rope = RopeConfig(head_dim=16, theta=500.0).build()
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator)

    def score(q_position, k_position):
        rotated_q = apply_rope(q, *rope(torch.tensor([[q_position]])))
        return (rotated_q * apply_rope(k, *rope(torch.tensor([[k_position]])))).sum()

    torch.testing.assert_close(score(105, 100), score(5, 0), rtol=1e-4, atol=1e-5)
    assert (score(105, 100) - score(103, 100)).abs() > 1e-2


def test_rotates_bfloat16_in_float32():
    x = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    cos, sin = RopeConfig(head_dim=8).build()(torch.arange(5).unsqueeze(0))
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (1, 1, 5, 4)
    assert torch.equal(apply_rope(x, cos, sin), apply_rope(x.float(), cos, sin).bfloat16())


def test_scaling_keeps_short_waves_and_stretches_long_ones():
    scaling = Llama3RopeScaling(original_max_length=1024)
    plain, scaled = (
        RopeConfig(head_dim=64, theta=10_000.0, scaling=kind).build()(torch.tensor([[1]]))[1].asin().flatten().double()
        for kind in (None, scaling)
    )
    wavelengths = 2 * math.pi / plain
    ratios = plain / scaled
    kept, stretched = wavelengths < 1024 / 4, wavelengths > 1024
    between = ~(kept | stretched)
    assert kept.sum() > 3 and stretched.sum() > 3 and between.sum() > 3
    torch.testing.assert_close(ratios[kept], torch.ones_like(ratios[kept]), rtol=1e-5, atol=0)
    torch.testing.assert_close(ratios[stretched], torch.full_like(ratios[stretched], 8.0), rtol=1e-5, atol=0)
    assert ((ratios[between] > 1.0) & (ratios[between] < 8.0)).all()
