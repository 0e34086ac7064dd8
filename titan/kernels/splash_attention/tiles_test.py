"""Block sizes: validation, defaults, and the estimate of VMEM."""

import pytest

from titan.kernels.generations import MIB
from titan.kernels.splash_attention.tiles import (
    PASSES,
    SplashTiles,
    TileShape,
    candidates,
    check_pass,
    resolve,
    table_key,
    vmem_bytes,
)
from titan.kernels.vmem import VmemError


def shape_of(length: int, **fields) -> TileShape:
    defaults = {"head_dim": 128, "itemsize": 2, "segmented": False, "soft_capped": False, "generation": "v6e"}
    return TileShape(length, **{**defaults, **fields})


@pytest.mark.parametrize(
    ("sizes", "message"),
    (
        ({"sa_block_q": 200}, "sa_block_q=200 must be a multiple of 128: take 128 or 256"),
        ({"sa_block_kv_dq": 100}, "sa_block_kv_dq=100 must be a multiple of 128: take 128"),
        ({"sa_block_q_dkv": -128}, "sa_block_q_dkv=-128 must be a multiple of 128: take 128"),
        (
            {"sa_block_kv": 1024, "sa_block_kv_compute": 384},
            "sa_block_kv=1024 must be a multiple of sa_block_kv_compute=384: take 768 or 1152",
        ),
        (
            {"sa_block_kv_dkv": 256, "sa_block_kv_dkv_compute": 512},
            "sa_block_kv_dkv=256 must be a multiple of sa_block_kv_dkv_compute=512: take 512",
        ),
        ({"sa_dq_reduction_steps": 2}, "sa_dq_reduction_steps=2: the kernel knows 0 and 3 only"),
    ),
)
def test_invalid_sizes_are_refused_with_the_nearest_valid_ones(sizes, message):
    with pytest.raises(ValueError, match=message):
        SplashTiles(**sizes)


def forward_blocks(tiles: SplashTiles) -> tuple[int, ...]:
    return tuple(getattr(tiles, name) for name in PASSES["forward"])


@pytest.mark.parametrize(
    ("given", "length", "tuned", "expected"),
    (
        ({}, 8192, None, (1024, 1024, 512)),
        ({}, 8192, {"sa_block_q": 512, "sa_block_kv_compute": 1024}, (512, 1024, 1024)),
        ({"sa_block_q": 2048}, 8192, {"sa_block_q": 512}, (2048, 1024, 512)),
        ({}, 4608, None, (768, 768, 384)),  # six blocks of 768; five of 1024 would be padded
        ({}, 300, None, (384, 384, 384)),
        ({"sa_block_q": 2048, "sa_block_kv": 1024, "sa_block_kv_compute": 256}, 300, None, (384, 384, 128)),
        ({"sa_block_kv_compute": 768}, 8192, None, (1024, 1536, 768)),
    ),
)
def test_zeros_are_resolved_and_blocks_clipped(given, length, tuned, expected):
    resolved = resolve(SplashTiles(**given), shape_of(length), tuned)
    assert forward_blocks(resolved) == expected
    assert resolve(resolved, shape_of(length)) == resolved


def test_blocks_beyond_the_budget_are_refused():
    tiles = resolve(SplashTiles(sa_block_q=4096, sa_block_kv=4096), shape_of(8192))
    message = (
        r"splash attention, forward: sa_block_q=4096 sa_block_kv=4096 sa_block_kv_compute=512 needs [\d.]+ MiB of "
        r"VMEM, and v6e gives a kernel 32 MiB: the largest that fit are sa_block_q=\d+ "
    )
    with pytest.raises(VmemError, match=message):
        check_pass("forward", tiles, shape_of(8192))


@pytest.mark.parametrize("kernel_pass", PASSES)
@pytest.mark.parametrize("generation", ("v5e", "v5p", "v6e", "tpu7x"))
def test_default_blocks_fit(kernel_pass, generation):
    for head_dim, itemsize in ((64, 2), (128, 4), (256, 4)):
        shape = shape_of(16384, head_dim=head_dim, itemsize=itemsize, segmented=True, generation=generation)
        check_pass(kernel_pass, resolve(SplashTiles(), shape), shape)


def test_tuned_blocks_that_do_not_fit_are_not_taken():
    tuned = {"sa_block_q": 2048, "sa_block_kv": 2048, "sa_block_kv_compute": 2048}
    assert forward_blocks(resolve(SplashTiles(), shape_of(8192), tuned)) == (2048, 2048, 2048)
    assert forward_blocks(resolve(SplashTiles(), shape_of(8192, itemsize=4), tuned)) == (1024, 1024, 512)


def test_a_window_that_hides_nothing_has_the_key_of_no_window():
    keys = [table_key("jax", 4096, 128, "bfloat16", True, window) for window in (0, 4096, 5000, 4095)]
    assert keys[:3] == ["jax_T4096_D128_bfloat16_causal"] * 3
    assert keys[3] == "jax_T4096_D128_bfloat16_causal_window4095"


@pytest.mark.parametrize("kernel_pass", PASSES)
def test_candidates_need_no_clipping(kernel_pass):
    for tiles in candidates(kernel_pass, 4608):
        resolved = resolve(tiles, shape_of(4608))
        assert all(getattr(tiles, name) == getattr(resolved, name) for name in PASSES[kernel_pass])


@pytest.mark.parametrize(
    ("kernel_pass", "blocks", "fields", "used"),
    (
        ("forward", (1024, 1024, 512), {}, 7.1),
        ("forward", (2048, 2048, 2048), {}, 25.8),
        ("forward", (4096, 1024, 512), {}, 24.9),
        ("forward", (1024, 1024, 512), {"generation": "tpu7x"}, 8.2),
        ("forward", (1024, 1024, 512), {"segmented": True, "soft_capped": True, "generation": "tpu7x"}, 9.3),
        ("forward", (1024, 1024, 512), {"head_dim": 256}, 9.8),
        ("dkv", (1024, 1024, 512), {}, 6.5),
        ("dkv", (2048, 2048, 2048), {}, 31.2),
        ("dkv", (1024, 1024, 512), {"segmented": True, "soft_capped": True}, 8.9),
        ("dkv", (1024, 1024, 512), {"itemsize": 4}, 10.3),
        ("dkv", (1024, 1024, 512), {"fused_backward": True}, 7.6),
        ("dkv", (1024, 1024, 512), {"fused_backward": True, "dq_reduction_steps": 3}, 11.1),
        ("dq", (1024, 1024), {}, 8.1),
        ("dq", (1024, 1024), {"segmented": True, "soft_capped": True, "generation": "tpu7x"}, 11.2),
        ("dq", (2048, 2048), {}, 28.8),
    ),
)
def test_estimate_against_the_mebibytes_that_the_compiler_used(kernel_pass, blocks, fields, used):
    # libtpu 0.0.42, a causal mask, bfloat16 and head dim 128 unless said otherwise.
    tiles = SplashTiles(**dict(zip(PASSES[kernel_pass], blocks, strict=True)))
    assert used <= vmem_bytes(kernel_pass, tiles, shape_of(16384, **fields)) / MIB <= 4 / 3 * used
