"""Shapes and masks for tests and benchmarks."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from titan.kernels.kernel_case import KernelCase
from titan.kernels.splash_attention.api import splash_attention_op
from titan.kernels.splash_attention.mask import PositionMask
from titan.kernels.splash_attention.tiles import SplashTiles, TileShape, resolve, vmem_bytes
from titan.kernels.splash_attention.vjp import splash_attention_backward


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """One attention.

    Attributes:
      num_heads, num_kv_heads, length, head_dim: N, K, T and D.
      batch_size: B.
      causal, window, soft_cap: see `splash_attention`.
      segments: "none"; "packed": segment ids; "own": keys have ids of their own, and some queries see no key.
    """

    num_heads: int
    num_kv_heads: int
    length: int
    head_dim: int = 128
    batch_size: int = 1
    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    segments: Literal["none", "packed", "own"] = "none"

    @property
    def name(self) -> str:
        """The attention in words."""
        return (
            f"{'causal' if self.causal else 'full'} T{self.length} N{self.num_heads} K{self.num_kv_heads} "
            f"D{self.head_dim}"
            + (f" window {self.window}" if self.window else "")
            + (f" soft cap {self.soft_cap:g}" if self.soft_cap else "")
            + (f" segments {self.segments}" if self.segments != "none" else "")
        )

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5

    @property
    def attributes(self) -> dict[str, bool | int | float]:
        """Attributes of the op, without block sizes."""
        return {"causal": self.causal, "window": self.window, "soft_cap": self.soft_cap, "scale": self.scale}


SMALL = (
    AttentionSpec(4, 2, 256, 32),
    AttentionSpec(4, 2, 200, 32, batch_size=2, window=50, soft_cap=5.0, segments="own"),
    AttentionSpec(2, 2, 200, 32, causal=False, window=70),
)
"""For kernels in the interpreter, with blocks of 128: GQA, padding, segments, empty rows, windows, soft cap."""

SMALL_TILES = SplashTiles(
    sa_block_q=128,
    sa_block_kv=128,
    sa_block_kv_compute=128,
    sa_block_q_dkv=128,
    sa_block_kv_dkv=128,
    sa_block_kv_dkv_compute=128,
    sa_block_q_dq=128,
    sa_block_kv_dq=128,
)
"""The smallest blocks."""

REAL = (
    *(
        AttentionSpec(num_heads, num_kv_heads, length)
        for length in (4096, 8192, 16384)
        for num_heads, num_kv_heads in ((32, 8), (32, 2))
    ),
    AttentionSpec(32, 8, 8192, window=2048, soft_cap=50.0, segments="packed"),
    AttentionSpec(24, 24, 4608, causal=False, segments="packed"),
)
"""Training shapes: language models with GQA 4:1 and 16:1, a windowed one over packed documents, and FLUX."""


def aot_cases(generation: str) -> list[KernelCase]:
    """The training shapes in bfloat16, by JAX's kernel with default or tuned blocks, for a TPU generation."""
    return [kernel_case(spec, generation) for spec in REAL]


def kernel_case(
    spec: AttentionSpec,
    generation: str,
    *,
    implementation: str = "jax",
    tiles: SplashTiles = SplashTiles(),  # noqa: B008, immutable
) -> KernelCase:
    """Forward and backward of an attention in bfloat16: functions of (q, k, v, grad_out[, segment_ids])."""
    q = jax.ShapeDtypeStruct((spec.batch_size, spec.num_heads, spec.length, spec.head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((spec.batch_size, spec.num_kv_heads, spec.length, spec.head_dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((spec.batch_size, spec.length), jnp.int32)
    pairs = PositionMask(spec.causal, spec.window).num_visible(spec.length)
    q_bytes, k_bytes = (x.size * x.dtype.itemsize for x in (q, k))
    logsumexp_bytes = 4 * q.size // spec.head_dim
    segmented = spec.segments != "none"
    shape = TileShape(
        length=spec.length,
        head_dim=spec.head_dim,
        itemsize=2,
        segmented=segmented or not spec.causal,
        soft_capped=bool(spec.soft_cap),
        fused_backward=implementation == "tokamax" or tiles.sa_use_fused_bwd_kernel,
        dq_reduction_steps=tiles.sa_dq_reduction_steps,
        generation=generation,
    )
    sizes = resolve(tiles, shape)
    return KernelCase(
        kernel="splash_attention",
        name=spec.name,
        args=(q, k, k, q, *([ids] if segmented else [])),
        fused=functools.partial(_fused, spec, implementation, tiles),
        unfused=functools.partial(_unfused, spec),
        # Two products forward, and two backward for each of them.
        flops=6 * 2 * spec.batch_size * spec.num_heads * spec.head_dim * pairs,
        # Forward reads q, k, v and writes out; backward reads these and grad_out, and writes three gradients.
        hbm_bytes=6 * q_bytes + 6 * k_bytes + 2 * logsumexp_bytes,
        vmem_bytes=max(vmem_bytes(kernel_pass, sizes, shape) for kernel_pass in shape.passes),
    )


def _fused(spec, implementation, tiles, q, k, v, grad_out, segment_ids=None):
    attributes = {**spec.attributes, **dataclasses.asdict(tiles), "implementation": implementation}
    out, logsumexp = splash_attention_op.jax(q, k, v, segment_ids, None, **attributes)
    backward = {name: attributes[name] for name in (*splash_attention_backward.signature.attributes, "implementation")}
    return out, splash_attention_backward.jax(q, k, v, segment_ids, None, out, logsumexp, grad_out, **backward)


def _unfused(spec, q, k, v, grad_out, segment_ids=None):
    out, vjp = jax.vjp(functools.partial(_naive_attention, spec, segment_ids), q, k, v)
    return out, vjp(grad_out)


def _naive_attention(spec, segment_ids, q, k, v):
    """With all scores at once, as XLA gets it from a model without a kernel."""
    batch_size, num_heads, length, head_dim = q.shape
    q = q.reshape(batch_size, spec.num_kv_heads, -1, length, head_dim)
    scores = jnp.einsum("bkgtd,bksd->bkgts", q, k, preferred_element_type=jnp.float32) * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    index = jnp.arange(length)
    visible = PositionMask(spec.causal, spec.window).visible(index[:, None], index)
    if segment_ids is not None:
        same = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None, None]
        visible = same if visible is None else visible & same
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bksd->bkgtd", weights, v).reshape(batch_size, num_heads, length, head_dim)
