"""The op `titan::splash_attention_backward`: gradients of attention from its saved results."""

import functools

import jax

from titan.kernels.jax_op import jax_op
from titan.kernels.splash_attention import pallas_tpu, xla
from titan.kernels.splash_attention.tiles import SplashTiles


def _backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    out: jax.Array,
    logsumexp: jax.Array,
    grad_out: jax.Array,
    query_starts: jax.Array | None = None,
    *,
    causal: bool,
    window: int,
    soft_cap: float,
    scale: float,
    sa_block_q_dkv: int = 0,
    sa_block_kv_dkv: int = 0,
    sa_block_kv_dkv_compute: int = 0,
    sa_block_q_dq: int = 0,
    sa_block_kv_dq: int = 0,
    sa_use_fused_bwd_kernel: bool = False,
    sa_dq_reduction_steps: int = 0,
) -> xla.Gradients:
    """Gradients of q, k and v, given inputs and results of `titan::splash_attention` and the gradient of `out`.

    logsumexp has no gradient. Attributes: see `SplashTiles` and `splash_attention`.
    """
    return xla.attention_backward(
        q,
        k,
        v,
        segment_ids,
        kv_segment_ids,
        out,
        logsumexp,
        grad_out,
        query_starts,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        scale=scale,
    )


splash_attention_backward = jax_op("titan::splash_attention_backward", backward=None)(_backward)


def _register(name: str, platforms: tuple[str, ...]) -> None:
    @splash_attention_backward.implementation(name, platforms=platforms, pallas=True)
    @functools.wraps(_backward)
    def implementation(*arrays, causal, window, soft_cap, scale, **sizes):
        return pallas_tpu.attention_backward(
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
