"""Tile sizes: validation, defaults, tuned tables."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from titan.kernels import tile_table
from titan.kernels.fused_linear_cross_entropy.tiles import (
    KERNEL,
    LinearCrossEntropyTiles,
    candidates,
    table_key,
    tiles_for,
    vmem_bytes,
)

MIB = 2**20


def arrays(num_tokens: int, embed_dim: int, vocab: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    shapes = ((num_tokens, embed_dim), (vocab, embed_dim))
    return tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)


@pytest.mark.parametrize("name", ["token_tile", "vocab_tile", "block_tokens", "block_vocab", "block_embed"])
def test_negative_sizes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is -128: it must be a multiple of 128, or 0 for the default"):
        LinearCrossEntropyTiles(**{name: -128})


def test_sizes_must_be_multiples_of_the_lanes() -> None:
    with pytest.raises(ValueError, match="vocab_tile is 100: it must be a multiple of 128"):
        LinearCrossEntropyTiles(vocab_tile=100)


@pytest.mark.parametrize("num_tokens", [1, 8192, 16384, 1 << 20])
@pytest.mark.parametrize("generation", ["", "v5e", "v6e", "tpu7x"])
def test_defaults_are_whole_sizes_within_the_vmem(num_tokens: int, generation: str) -> None:
    for embed_dim in (64, 4096, 6656, 16384):
        tiles = tiles_for(*arrays(num_tokens, embed_dim, 202048), generation=generation)
        assert min(tiles.token_tile, tiles.vocab_tile, tiles.block_tokens, tiles.block_vocab) >= 128
        assert embed_dim % tiles.block_embed == 0
        assert vmem_bytes(tiles, 2) <= (16 if generation == "v5e" else 32) * MIB


def test_sizes_are_no_larger_than_the_shape() -> None:
    tiles = tiles_for(*arrays(5, 64, 300), generation="v6e", vocab_tile=4096, token_tile=2048)
    assert (tiles.token_tile, tiles.vocab_tile, tiles.block_tokens, tiles.block_vocab) == (128, 384, 128, 384)


def test_asked_sizes_go_before_tuned_ones_before_defaults(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tile_table.FOLDER_VARIABLE, str(tmp_path))
    tuned = {"vocab_tile": 256, "block_vocab": 512}
    path = tmp_path / tile_table.file_name(KERNEL, "v6e")
    tile_table.write_table(path, {table_key(8192, 4096, 128256, 2): tuned})
    default = tiles_for(*arrays(8192, 4096, 128000), generation="v6e")
    tiles = tiles_for(*arrays(8192, 4096, 128256), generation="v6e", vocab_tile=1024)
    assert (tiles.vocab_tile, tiles.block_vocab, tiles.block_tokens) == (1024, 512, default.block_tokens)
    assert default.block_vocab != 512


@pytest.mark.parametrize("embed_dim", [96, 4096, 6656])
def test_candidates_fit_and_divide(embed_dim: int) -> None:
    found = list(candidates(embed_dim, 2, "v5e"))
    assert len(found) == len(set(found)) > 3
    assert all(vmem_bytes(tiles, 2) <= 16 * MIB and embed_dim % tiles.block_embed == 0 for tiles in found)
