"""Splash attention as the tuner sees it: each of its three kernels at the shapes that published models train at."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from titan.kernels.kernel_case import TuningCase
from titan.kernels.splash_attention.api import splash_attention_op
from titan.kernels.splash_attention.tiles import (
    PASSES,
    SplashTiles,
    TileShape,
    candidates,
    check_pass,
    resolve,
    table_key,
)
from titan.kernels.vmem import VmemError

_HLO_NAMES = {
    "forward": "splash_mha_fwd_segmented_residuals",
    "dkv": "splash_mha_dkv_segmented_no_residuals",
    "dq": "splash_mha_dq_segmented_no_residuals",
}
_HEAD_DIM = 128
# One query head and its key/value head: heads are a dim of the grid, and change no block.
_HEADS = 1

# Tokens, and the window or 0: Llama 3, Qwen3, and Muse Glimmer's windowed and global layers.
_SHAPES = ((4096, 0), (8192, 0), (16384, 0), (16384, 2048))


def tuning_cases(generation: str) -> Iterator[TuningCase]:
    """Cases of the "jax" implementation, bfloat16, causal, with segment ids."""
    for (length, window), kernel_pass in itertools.product(_SHAPES, PASSES):
        yield TuningCase(
            kernel="splash_attention",
            key=table_key("jax", length, _HEAD_DIM, "bfloat16", True, window),
            pass_name=kernel_pass,
            args=_arguments(length, backward=kernel_pass != "forward"),
            candidates=tuple(_fitting(kernel_pass, length, generation)),
            build=functools.partial(_build, kernel_pass, window),
            hlo_name=_HLO_NAMES[kernel_pass],
            num_steps=functools.partial(_num_steps, kernel_pass, length, window),
        )


def _arguments(length: int, *, backward: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    heads = jax.ShapeDtypeStruct((1, _HEADS, length, _HEAD_DIM), jnp.bfloat16)
    segment_ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    logsumexp = jax.ShapeDtypeStruct((1, _HEADS, length), jnp.float32)
    return (heads, heads, heads, segment_ids, *((heads, logsumexp, heads) if backward else ()))


def _fitting(kernel_pass: str, length: int, generation: str) -> Iterator[dict[str, int]]:
    shape = TileShape(length, _HEAD_DIM, itemsize=2, segmented=True, soft_capped=False, generation=generation)
    for tiles in candidates(kernel_pass, length):
        resolved = resolve(tiles, shape)
        try:
            check_pass(kernel_pass, resolved, shape)
        except VmemError:
            continue
        yield {name: getattr(resolved, name) for name in PASSES[kernel_pass]}


def _build(kernel_pass: str, window: int, sizes: dict[str, int]) -> Any:
    attributes = dict(
        causal=True,
        window=window,
        soft_cap=0.0,
        scale=1.0,
        implementation="jax",
        **dataclasses.asdict(SplashTiles(**sizes)),
    )
    if kernel_pass == "forward":
        return lambda q, k, v, ids: splash_attention_op.jax(q, k, v, ids, None, **attributes)

    def gradient(q, k, v, ids, out, logsumexp, grad):
        gradients = splash_attention_op.backward.jax(q, k, v, ids, None, out, logsumexp, grad, **attributes)
        return gradients.q if kernel_pass == "dq" else (gradients.k, gradients.v)

    return gradient


def _num_steps(kernel_pass: str, length: int, window: int, sizes: dict[str, int]) -> int:
    """Pairs of a block of queries and a block of keys in which some query sees some key."""
    block_q, block_kv = (sizes[name] for name in PASSES[kernel_pass][:2])
    num_steps = 0
    for first_q, first_kv in itertools.product(range(0, length, block_q), range(0, length, block_kv)):
        seen = first_kv <= first_q + block_q - 1
        in_window = not window or first_q - (first_kv + block_kv - 1) < window
        num_steps += seen and in_window
    return num_steps * _HEADS
