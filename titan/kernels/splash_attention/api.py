"""`splash_attention`: causal, windowed, segmented and soft-capped grouped-query attention in O(T) memory.

The op `titan::splash_attention` has the implementations "xla", plain XLA operations; "jax", the Pallas kernel that
comes with JAX, which TPUs take; and "tokamax", tokamax's version of that kernel.
"""

import dataclasses
import functools

import jax
import torch
from torch import Tensor

from titan.kernels.jax_op import jax_op
from titan.kernels.splash_attention import pallas_tpu, xla
from titan.kernels.splash_attention.tiles import SplashTiles
from titan.kernels.splash_attention.vjp import splash_attention_backward

_DTYPES = (torch.float32, torch.bfloat16)


def splash_attention(
    q_BNTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    segment_ids_BT: Tensor | None = None,
    kv_segment_ids_BT: Tensor | None = None,
    query_starts_C: Tensor | None = None,
    *,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    scale: float,
    tiles: SplashTiles = SplashTiles(),  # noqa: B008, immutable
    implementation: str = "auto",
) -> Tensor:
    """softmax(cap(scale * q k^T) + mask) v, where cap(x) = soft_cap * tanh(x / soft_cap), or x if soft_cap is 0.

    Scores, softmax and sums are float32. Query head n attends to key/value head n // (N / K); keys and values are not
    repeated. A query that sees no key, which only a kv_segment_ids_BT of its own can bring about, yields 0 and passes
    no gradient on.

    Args:
      q_BNTD: queries, float32 or bfloat16.
      k_BKTD: keys, of q's dtype; N is a multiple of K.
      v_BKTD: values, of q's dtype.
      segment_ids_BT: integers of the int32 range without its least; a query sees only keys of its own id. None: all.
      kv_segment_ids_BT: ids of the keys, if they are not those of the queries.
      query_starts_C: int32, for queries that are a part of the sequence, as C chunks of T / C neighbouring tokens: the
        index among all tokens of the first query of each chunk. Keys, values and kv_segment_ids_BT are then those of
        all tokens, in their order. Not for the implementation "tokamax". None: queries and keys are the same tokens.
      causal: query t sees key s only if s <= t.
      window: query t sees key s only if t - s < window and, if not causal, s - t < window; 0: no window.
      soft_cap: bound of the scores; 0: none.
      scale: factor of the scores; usually D ** -0.5.
      tiles: block sizes of the TPU kernels, which pad T to whole blocks.
      implementation: "auto" (by the platform), "xla", "jax" or "tokamax".

    Returns:
      out_BNTD in q's dtype.

    Raises:
      ValueError: shapes or attributes do not fit each other; on TPU also `VmemError`, if the blocks are too large.
      NotImplementedError: another dtype, or query_starts with "tokamax".
    """
    _check(q_BNTD, k_BKTD, v_BKTD, segment_ids_BT, kv_segment_ids_BT, query_starts_C, window, soft_cap)
    if query_starts_C is not None and implementation == "tokamax":
        raise NotImplementedError("tokamax's kernel takes all queries, and query_starts are given: take another")
    return splash_attention_op(
        q_BNTD,
        k_BKTD,
        v_BKTD,
        segment_ids_BT,
        kv_segment_ids_BT,
        query_starts_C,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        scale=scale,
        implementation=implementation,
        **dataclasses.asdict(tiles),
    ).out


def _check(q, k, v, segment_ids, kv_segment_ids, query_starts, window, soft_cap) -> None:
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q and k must be [batch, heads, tokens, head dim]: q {list(q.shape)}, k {list(k.shape)}")
    if not q.numel() or not k.numel():
        raise ValueError(f"q {list(q.shape)} or k {list(k.shape)} is empty: give at least one element")
    batch, num_heads, length, head_dim = q.shape
    num_kv_heads, kv_length = k.shape[1:3]
    if query_starts is None:
        kv_length = length
    if k.shape != v.shape or k.shape != (batch, num_kv_heads, kv_length, head_dim):
        raise ValueError(
            f"k and v must have the batch, {'tokens ' if query_starts is None else ''}and head dim of q: "
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if query_starts is not None and (query_starts.dim() != 1 or not len(query_starts) or length % len(query_starts)):
        raise ValueError(
            f"query_starts must be [chunks], which divide the {length} queries: it is {list(query_starts.shape)}"
        )
    if query_starts is not None and segment_ids is not None and kv_segment_ids is None:
        raise ValueError("segment_ids with query_starts need kv_segment_ids: the ids of all tokens")
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, which must be a multiple of the {num_kv_heads} of k and v")
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(
            f"q, k and v must be all float32 or all bfloat16: they are {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if segment_ids is None and kv_segment_ids is not None:
        raise ValueError("kv_segment_ids needs segment_ids: the ids of the queries")
    for name, ids, tokens in (
        ("segment_ids", segment_ids, length),
        ("kv_segment_ids", kv_segment_ids, kv_length),
    ):
        if ids is None:
            continue
        if ids.shape != (batch, tokens):
            raise ValueError(f"{name} must be [batch, tokens] = {[batch, tokens]}: it is {list(ids.shape)}")
        if ids.dtype not in (torch.int32, torch.int64):
            raise NotImplementedError(f"{name} must be int32 or int64: it is {ids.dtype}")
    if window < 0:
        raise ValueError(f"window={window} must be at least 1, or 0 for none")
    if soft_cap < 0:
        raise ValueError(f"soft_cap={soft_cap} must be positive, or 0 for none")


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    query_starts: jax.Array | None = None,
    *,
    causal: bool,
    window: int,
    soft_cap: float,
    scale: float,
    sa_block_q: int = 0,
    sa_block_kv: int = 0,
    sa_block_kv_compute: int = 0,
    sa_block_q_dkv: int = 0,
    sa_block_kv_dkv: int = 0,
    sa_block_kv_dkv_compute: int = 0,
    sa_block_q_dq: int = 0,
    sa_block_kv_dq: int = 0,
    sa_use_fused_bwd_kernel: bool = False,
    sa_dq_reduction_steps: int = 0,
) -> xla.Attention:
    """`splash_attention` as an op: out [B, N, T, D], and logsumexp [B, N, T] in float32, -inf where no key is seen."""
    return xla.attention(
        q, k, v, segment_ids, kv_segment_ids, query_starts, causal=causal, window=window, soft_cap=soft_cap, scale=scale
    )


splash_attention_op = jax_op("titan::splash_attention", backward=splash_attention_backward, memory_kind="attention")(
    _forward
)


def _register(name: str, platforms: tuple[str, ...]) -> None:
    @splash_attention_op.implementation(name, platforms=platforms, pallas=True)
    @functools.wraps(_forward)
    def implementation(*arrays, causal, window, soft_cap, scale, **sizes):
        return pallas_tpu.attention(
            name,
            *arrays,
            causal=causal,
            window=window,
            soft_cap=soft_cap,
            scale=scale,
            tiles=SplashTiles(**sizes),
        )


_register("jax", ("tpu",))
_register("tokamax", ())
