"""Attention on TPU by the splash attention kernels of JAX and of tokamax.

Both libraries offer one function whose gradient is JAX's business. Here forward and backward are ops of their own, with
the logsumexp between them, so that a training graph can store, offload or recompute it; hence the calls below to the
functions behind `jax.custom_vjp`, which are private. JAX and tokamax are pinned, and the tests run every path.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from titan.kernels._compat import jax_splash, tokamax_residuals, tokamax_splash
from titan.kernels.splash_attention.block_visits import block_visits
from titan.kernels.splash_attention.mask import PositionMask
from titan.kernels.splash_attention.tiles import SplashTiles, TileShape, check_pass, resolve, table_key
from titan.kernels.splash_attention.xla import Attention, Gradients
from titan.kernels.target import current_target
from titan.kernels.tile_table import lookup

# The segment id of padding, which no token may have.
PADDING_SEGMENT = np.iinfo(np.int32).min
# Stands for the logsumexp of a row with nothing to differentiate: exp(score - this) is 0.
_NEVER = 0.5 * float(np.finfo(np.float32).max)
_LOG2_E = math.log2(math.e)


class _Problem(NamedTuple):
    """What is the same for all sequences of a batch; chunks of queries, and the keys, are padded to whole blocks."""

    mask: PositionMask
    soft_cap: float
    tiles: SplashTiles
    length_q: int
    length_kv: int
    query_starts: jax.Array | None

    def padded_queries(self, x: jax.Array, value: float = 0.0) -> jax.Array:
        """[B, heads, T, ...] with each chunk of queries padded at its end."""
        if self.query_starts is None:
            return _padded(x, self.length_q, value)
        num_chunks = len(self.query_starts)
        chunks = x.reshape(x.shape[0], -1, x.shape[2] // num_chunks, *x.shape[3:])
        return _padded(chunks, self.length_q // num_chunks, value).reshape(*x.shape[:2], self.length_q, *x.shape[3:])

    def queries(self, x: jax.Array, length: int) -> jax.Array:
        """[B, heads, length, ...]: undoes `padded_queries`."""
        if self.query_starts is None:
            return x[:, :, :length]
        num_chunks = len(self.query_starts)
        chunks = x.reshape(x.shape[0], -1, self.length_q // num_chunks, *x.shape[3:])[:, :, : length // num_chunks]
        return chunks.reshape(*x.shape[:2], length, *x.shape[3:])


def attention(
    kernel: str,
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
    tiles: SplashTiles,
) -> Attention:
    """Forward pass by the kernel of "jax" or "tokamax"; the other arguments are those of the op.

    Raises:
      VmemError: the blocks do not fit the target's vector memory.
    """
    length = q.shape[2]
    mask = PositionMask(causal, window).within(k.shape[2])
    tiles, _ = _tiles(kernel, q, k, segment_ids, query_starts, mask, soft_cap, tiles, backward=False)
    problem = _problem(q, k, query_starts, mask, soft_cap, tiles, [tiles.sa_block_q], [tiles.sa_block_kv])
    segments = _segments(problem, q, k, segment_ids, kv_segment_ids)
    forward = {"jax": _jax_forward, "tokamax": _tokamax_forward}[kernel]
    out, logsumexp = _over_batch(functools.partial(forward, problem))(
        problem.padded_queries((q * scale).astype(q.dtype)),
        _padded(k, problem.length_kv),
        _padded(v, problem.length_kv),
        segments,
    )
    out, logsumexp = problem.queries(out, length), problem.queries(logsumexp, length)
    if kv_segment_ids is not None:
        # The kernels give a row that sees no key the mean of the values, and the mask value as its logsumexp.
        empty = logsumexp < -_NEVER * 0.5
        out = jnp.where(empty[..., None], 0.0, out).astype(q.dtype)
        logsumexp = jnp.where(empty, -jnp.inf, logsumexp)
    return Attention(out, logsumexp)


def attention_backward(
    kernel: str,
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
    tiles: SplashTiles,
) -> Gradients:
    """Backward pass; see `attention`."""
    length, kv_length = q.shape[2], k.shape[2]
    mask = PositionMask(causal, window).within(kv_length)
    tiles, fused = _tiles(kernel, q, k, segment_ids, query_starts, mask, soft_cap, tiles, backward=True)
    blocks_q, blocks_kv = [tiles.sa_block_q_dkv], [tiles.sa_block_kv_dkv]
    if not fused:
        blocks_q.append(tiles.sa_block_q_dq)
        blocks_kv.append(tiles.sa_block_kv_dq)
    problem = _problem(q, k, query_starts, mask, soft_cap, tiles, blocks_q, blocks_kv)
    segments = _segments(problem, q, k, segment_ids, kv_segment_ids)
    logsumexp = jnp.where(jnp.isneginf(logsumexp), _NEVER, logsumexp)
    backward = {"jax": _jax_backward, "tokamax": _tokamax_backward}[kernel]
    grad_q, grad_k, grad_v = _over_batch(functools.partial(backward, problem))(
        problem.padded_queries((q * scale).astype(q.dtype)),
        _padded(k, problem.length_kv),
        _padded(v, problem.length_kv),
        segments,
        problem.padded_queries(out),
        problem.padded_queries(logsumexp, _NEVER),
        problem.padded_queries(grad_out),
    )
    grad_q = (problem.queries(grad_q, length).astype(jnp.float32) * scale).astype(q.dtype)
    return Gradients(grad_q, grad_k[:, :, :kv_length], grad_v[:, :, :kv_length])


def _over_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one sequence as one of a batch: a further grid dim, which the interpreter cannot do."""
    if current_target().platform == "tpu":
        return jax.vmap(function)
    return lambda *arrays: jax.lax.map(lambda sequence: function(*sequence), arrays)


def _tiles(
    kernel, q, k, segment_ids, query_starts, mask, soft_cap, tiles, *, backward: bool
) -> tuple[SplashTiles, bool]:
    """Concrete sizes for the target, which they fit, and whether the backward pass is one kernel."""
    length, head_dim = k.shape[2:]
    generation = current_target().generation
    shape = TileShape(
        length=length,
        query_length=q.shape[2] // _num_chunks(query_starts),
        head_dim=head_dim,
        itemsize=q.dtype.itemsize,
        segmented=segment_ids is not None or not mask.causal,  # padding may bring them about
        soft_capped=bool(soft_cap),
        fused_backward=kernel == "tokamax" or tiles.sa_use_fused_bwd_kernel,
        dq_reduction_steps=tiles.sa_dq_reduction_steps if kernel == "tokamax" else 0,
        generation=generation,
    )
    key = table_key(kernel, length, head_dim, q.dtype.name, mask.causal, mask.window)
    tiles = resolve(tiles, shape, lookup("splash_attention", generation, key))
    for kernel_pass in shape.passes[1:] if backward else shape.passes[:1]:
        check_pass(kernel_pass, tiles, shape)
    return tiles, shape.fused_backward


def _problem(q, k, query_starts, mask, soft_cap, tiles, blocks_q, blocks_kv) -> _Problem:
    num_chunks, step_q, step_kv = _num_chunks(query_starts), math.lcm(*blocks_q), math.lcm(*blocks_kv)
    length_q = num_chunks * (-(-(q.shape[2] // num_chunks) // step_q) * step_q)
    return _Problem(mask, soft_cap, tiles, length_q, -(-k.shape[2] // step_kv) * step_kv, query_starts)


def _num_chunks(query_starts: jax.Array | None) -> int:
    return 1 if query_starts is None else len(query_starts)


def _padded(x: jax.Array, length: int, value: float = 0.0) -> jax.Array:
    """[B, heads, T, ...] with T padded at its end."""
    widths = [(0, 0)] * x.ndim
    widths[2] = (0, length - x.shape[2])
    return jnp.pad(x, widths, constant_values=value)


def _segments(
    problem: _Problem, q: jax.Array, k: jax.Array, segment_ids: jax.Array | None, kv_segment_ids: jax.Array | None
) -> tuple[jax.Array, jax.Array] | None:
    """Padded segment ids of queries and keys, or None if nothing needs them.

    Padded keys lie after every real query, so that a causal mask hides them by itself.
    """
    if segment_ids is None:
        if problem.mask.causal or problem.length_kv == k.shape[2]:
            return None
        segment_ids, kv_segment_ids = (jnp.zeros((x.shape[0], x.shape[2]), jnp.int32) for x in (q, k))
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    return (
        problem.padded_queries(segment_ids[:, None], PADDING_SEGMENT)[:, 0],
        _padded(kv_segment_ids[:, None], problem.length_kv, PADDING_SEGMENT)[:, 0],
    )


def _position_mask(mask_library: Any, problem: _Problem) -> Any:
    """The mask as an object of JAX's or tokamax's library, which evaluates it a block at a time."""
    shape, window = (problem.length_q, problem.length_kv), problem.mask.window
    if window:
        return mask_library.LocalMask(shape, (window - 1, 0 if problem.mask.causal else window - 1), offset=0)
    return mask_library.CausalMask(shape) if problem.mask.causal else mask_library.FullMask(shape)


def _jax_common(problem: _Problem) -> dict[str, Any]:
    splash = jax_splash().kernel

    tiles, fused = problem.tiles, problem.tiles.sa_use_fused_bwd_kernel
    return {
        "mask_value": splash.DEFAULT_MASK_VALUE,
        "is_mqa": False,
        "block_sizes": splash.BlockSizes(
            block_q=tiles.sa_block_q,
            block_kv=tiles.sa_block_kv,
            block_kv_compute=tiles.sa_block_kv_compute,
            block_q_dkv=tiles.sa_block_q_dkv,
            block_kv_dkv=tiles.sa_block_kv_dkv,
            block_kv_dkv_compute=tiles.sa_block_kv_dkv_compute,
            block_q_dq=None if fused else tiles.sa_block_q_dq,
            block_kv_dq=None if fused else tiles.sa_block_kv_dq,
            use_fused_bwd_kernel=fused,
        ),
        "residual_checkpoint_name": None,
        "attn_logits_soft_cap": problem.soft_cap or None,
        "interpret": False,
    }


def _jax_mask_info(problem: _Problem, blocks: tuple[int, int], *, dkv: bool = False) -> tuple[Any, Any]:
    _, masks, mask_info, _ = jax_splash()

    # One mask stands for all heads. The grid of the fused backward must not shrink: it writes dq for every block.
    shrink = not (dkv and problem.tiles.sa_use_fused_bwd_kernel)
    if problem.query_starts is not None and (problem.mask.causal or problem.mask.window):
        visits = block_visits(
            problem.mask, problem.query_starts, problem.length_q, problem.length_kv, blocks, by_key=dkv, shrink=shrink
        )
        info = mask_info.MaskInfo(visits.block, None, visits.is_visited, None, visits.query_index)
        return info, problem.mask.visible
    mask = masks.MultiHeadMask((_position_mask(masks, problem),))
    if dkv:
        info, function = mask_info.process_mask_dkv(mask, blocks, shrink_grid=shrink)
    else:
        info, function = mask_info.process_mask(mask, blocks)
    return jax.tree.map(jnp.asarray, info), function


def _jax_segments(segments):
    splash = jax_splash().kernel

    return None if segments is None else splash.SegmentIds(*segments)


def _jax_forward(problem: _Problem, q_NTD, k_KTD, v_KTD, segments) -> tuple[jax.Array, jax.Array]:
    splash = jax_splash().kernel

    info, function = _jax_mask_info(problem, (problem.tiles.sa_block_q, problem.tiles.sa_block_kv))
    out, (logsumexp,) = splash._splash_attention_forward(
        info,
        q_NTD,
        k_KTD,
        v_KTD,
        _jax_segments(segments),
        sinks=None,
        save_residuals=True,
        mask_function=function,
        **_jax_common(problem),
    )
    return out, logsumexp


def _jax_backward(problem: _Problem, q_NTD, k_KTD, v_KTD, segments, out, logsumexp, grad_out) -> tuple[jax.Array, ...]:
    splash = jax_splash().kernel

    tiles = problem.tiles
    dkv_info, function = _jax_mask_info(problem, (tiles.sa_block_q_dkv, tiles.sa_block_kv_dkv), dkv=True)
    dq_info = None
    if not tiles.sa_use_fused_bwd_kernel:
        dq_info, _ = _jax_mask_info(problem, (tiles.sa_block_q_dq, tiles.sa_block_kv_dq))
    residuals = (q_NTD, k_KTD, v_KTD, _jax_segments(segments), None, out, logsumexp, dq_info, dkv_info)
    gradients = splash._splash_attention_bwd(
        save_residuals=False, mask_function=function, res=residuals, do=grad_out, **_jax_common(problem)
    )
    return gradients[3:6]


def _tokamax_common(problem: _Problem) -> dict[str, Any]:
    splash, _, _, base = tokamax_splash()

    tiles = problem.tiles
    return {
        "mask_value": base.DEFAULT_MASK_VALUE,
        "is_mqa": False,
        "config": splash.SplashConfig(
            block_q=tiles.sa_block_q,
            block_kv=tiles.sa_block_kv,
            block_kv_compute=tiles.sa_block_kv_compute,
            block_q_dkv=tiles.sa_block_q_dkv,
            block_kv_dkv=tiles.sa_block_kv_dkv,
            block_kv_dkv_compute=tiles.sa_block_kv_dkv_compute,
            attn_logits_soft_cap=problem.soft_cap or None,
            use_base2_exp=True,
            dq_reduction_steps=tiles.sa_dq_reduction_steps or None,
        ),
    }


def _tokamax_mask_info(problem: _Problem, blocks: tuple[int, int], **options: Any) -> tuple[Any, Any, float]:
    """Mask, its function, and the share of blocks that are visited, which tells the compiler the cost."""
    _, masks, mask_info, _ = tokamax_splash()

    info, function = mask_info._process_mask(_position_mask(masks, problem), blocks, **options)
    visited = 1.0 if info.block_mask is None else float(np.mean(info.block_mask != 0))
    return jax.tree.map(jnp.asarray, info), function, visited


def _tokamax_segments(segments):
    base = tokamax_splash().base

    return None if segments is None else base.SegmentIds(*segments)


def _tokamax_forward(problem: _Problem, q_NTD, k_KTD, v_KTD, segments) -> tuple[jax.Array, jax.Array]:
    splash = tokamax_splash().kernel

    blocks = (problem.tiles.sa_block_q, problem.tiles.sa_block_kv)
    info, function, visited = _tokamax_mask_info(problem, blocks, is_dkv=False)
    out, statistics = splash._splash_attention_forward(
        info,
        q_NTD,
        k_KTD,
        v_KTD,
        _tokamax_segments(segments),
        sinks=None,
        save_residuals=True,
        mask_function=function,
        fwd_mask_sparsity=visited,
        **_tokamax_common(problem),
    )
    return out, statistics["logsumexp"] / _LOG2_E  # the kernel works in base 2


def _tokamax_backward(
    problem: _Problem, q_NTD, k_KTD, v_KTD, segments, out, logsumexp, grad_out
) -> tuple[jax.Array, ...]:
    splash = tokamax_splash().kernel

    tiles = problem.tiles
    info, function, visited = _tokamax_mask_info(
        problem,
        (tiles.sa_block_q_dkv, tiles.sa_block_kv_dkv),
        is_dkv=True,
        return_dynamic_grid=tiles.sa_dq_reduction_steps == 3,
    )
    residuals = tokamax_residuals(
        q_NTD, k_KTD, v_KTD, _tokamax_segments(segments), None, out, logsumexp * _LOG2_E, info
    )
    gradients = splash._splash_attention_bwd(
        save_residuals=False,
        mask_function=function,
        fwd_mask_sparsity=1.0,
        dkv_mask_sparsity=visited,
        res=residuals,
        grads=grad_out,
        **_tokamax_common(problem),
    )
    return gradients[2:5]
