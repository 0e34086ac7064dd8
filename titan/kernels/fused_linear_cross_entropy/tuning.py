"""Fused linear cross-entropy as the tuner sees it: the kernel of the statistics, at the heads of real models.

The tiles of the XLA loops, `token_tile` and `vocab_tile`, are no part of a Mosaic kernel, and are not searched.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from titan.kernels.fused_linear_cross_entropy import pallas_tpu  # noqa: F401  (registers the implementation "mosaic")
from titan.kernels.fused_linear_cross_entropy.arg_specs import LARGE, LossShape
from titan.kernels.fused_linear_cross_entropy.tiles import KERNEL, candidates, table_key
from titan.kernels.fused_linear_cross_entropy.xla import logits_statistics
from titan.kernels.generations import find_generation
from titan.kernels.kernel_case import TuningCase

_BLOCKS = ("block_tokens", "block_vocab", "block_embed")
_ITEMSIZE = 2


def tuning_cases(generation: str) -> Iterator[TuningCase]:
    """Cases in bfloat16 for a TPU generation ("v5e", "v5p", "v6e", "tpu7x")."""
    for shape in LARGE:
        yield TuningCase(
            kernel=KERNEL,
            key=table_key(shape.num_tokens, shape.embed_dim, shape.vocab, _ITEMSIZE),
            pass_name="statistics",
            args=shape.args(),
            candidates=tuple(_sparing(shape.embed_dim, generation)),
            build=functools.partial(_build, shape),
            hlo_name="linear_cross_entropy_statistics",
            num_steps=functools.partial(_num_steps, shape),
        )


def _sparing(embed_dim: int, generation: str) -> Iterator[dict[str, int]]:
    for tiles in candidates(embed_dim, _ITEMSIZE, generation):
        tokens, vocab = tiles.block_tokens, tiles.block_vocab
        # A step multiplies [tokens, e] by [e, vocab] and reads both. The compiler's schedule knows nothing of waits for
        # memory: blocks that do fewer FLOPs for each byte they read than the TPU can would wait, and are not tried.
        if 2 * tokens * vocab >= find_generation(generation).flops_per_byte * _ITEMSIZE * (tokens + vocab):
            yield {name: getattr(tiles, name) for name in _BLOCKS}


def _build(shape: LossShape, sizes: dict[str, int]) -> Callable[..., Any]:
    return functools.partial(logits_statistics.jax, scale=shape.scale, soft_cap=shape.soft_cap, **sizes)


def _num_steps(shape: LossShape, sizes: dict[str, int]) -> int:
    dims = (shape.num_tokens, shape.vocab, shape.embed_dim)
    tokens, vocab, embed = (-(-dim // sizes[name]) for dim, name in zip(dims, _BLOCKS, strict=True))
    return tokens * vocab * embed
