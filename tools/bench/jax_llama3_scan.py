"""A Llama 3 training step of full size written by hand in JAX: the peer of titan's scanned and recomputed step.

It imports nothing of titan. Layers are stacked and run by `lax.scan`, each recomputed in the backward pass from its
input (`jax.checkpoint`); attention is JAX's splash kernel. Parameters and moments are float32, sharded over all devices
along one dim (FSDP by `shard_map`): a layer's weights are gathered in bfloat16 inside the loop's body, and gradients
are reduce-scattered in float32.

What was tried, compiled with libtpu 0.0.42 for Llama 3 8B on v6e-2x4, 8 sequences of 4096 tokens: memory of a device at
its peak, and seconds of a step by titan's model.

                                                                                              GiB      s
    kept: as below                                                                            18.55    0.840
    one matrix for q, k and v, one for gate and up                                            18.42    0.849
    the same, and activations as matrices [B T, E]                                            18.42    0.862
    the same with [B, T, E], and the loss in float32 without a VJP of its own                 18.77    0.845
    one matrix each, xla_jf_bf16_propagation=false: XLA no longer casts all layers' weights   17.65    0.864
    before the loop

Shapes: B batch of one device, T tokens, M = B T, E model dim, N query heads, K key/value heads, D head dim, H half of
it, F inner dim of the feed-forward block, V vocabulary, L layers.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tools.bench.jax_llama3 import Batch, Hyperparameters, Params, TrainState, update

AXIS = "fsdp"
BATCH_TENSORS = ("tokens", "labels", "positions", "segment_ids")


@dataclasses.dataclass(frozen=True)
class ScanHyperparameters(Hyperparameters):
    """What a step of full size needs besides.

    Attributes:
      dim, ffn_dim, vocab_size: E, F, V.
      rope_scaling: that of Llama 3.1 (factor, low and high frequency factor, original length); () is none.
      loss_chunks: 1 keeps the logits of the forward pass for the backward. More cut the vocabulary into as many chunks,
        whose logits are made in both passes: one more matrix product, and no more than one chunk's logits at a time.
      compute_dtype: of gathered weights and activations.
      interpret: run the attention kernel in Pallas's interpreter, where there is no TPU.
    """

    dim: int
    ffn_dim: int
    vocab_size: int
    rope_scaling: tuple[float, ...] = ()
    loss_chunks: int = 1
    compute_dtype: Any = jnp.bfloat16
    interpret: bool = False


def parameter_shapes(h: ScanHyperparameters) -> Params:
    """The shape of each parameter; matrices of layers are [in, out] and stacked, those of the vocabulary [V, E]."""
    q_dim, kv_dim = h.num_heads * h.head_dim, h.num_kv_heads * h.head_dim
    layer = {
        "attention_norm": (h.dim,),
        "q": (h.dim, q_dim),
        "k": (h.dim, kv_dim),
        "v": (h.dim, kv_dim),
        "out": (q_dim, h.dim),
        "feed_forward_norm": (h.dim,),
        "gate": (h.dim, h.ffn_dim),
        "up": (h.dim, h.ffn_dim),
        "down": (h.ffn_dim, h.dim),
    }
    return {
        "embedding": (h.vocab_size, h.dim),
        "layers": {name: (h.num_layers, *shape) for name, shape in layer.items()},
        "norm": (h.dim,),
        "head": (h.vocab_size, h.dim),
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(shard: jax.Array, dtype: Any) -> jax.Array:
    """The weight in `dtype` from its shards along dim 0; its gradients are summed in the shard's dtype."""
    return lax.all_gather(shard.astype(dtype), AXIS, axis=0, tiled=True)


def _gather_forward(shard: jax.Array, dtype: Any) -> tuple[jax.Array, None]:
    return _gather(shard, dtype), None


def _gather_backward(dtype: Any, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (lax.psum_scatter(grad.astype(jnp.float32), AXIS, scatter_dimension=0, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def _norm(x_BTE: jax.Array, weight_E: jax.Array, eps: float) -> jax.Array:
    x32_BTE = x_BTE.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32_BTE * x32_BTE, -1, keepdims=True) + eps)
    return (x32_BTE * scale * weight_E.astype(jnp.float32)).astype(x_BTE.dtype)


def _rope_tables(positions_BT: jax.Array, h: ScanHyperparameters) -> tuple[jax.Array, jax.Array]:
    frequencies_H = h.rope_theta ** (-np.arange(0, h.head_dim, 2, dtype=np.float32) / h.head_dim)
    if h.rope_scaling:
        factor, low, high, original_length = h.rope_scaling
        turns_H = frequencies_H * original_length / (2 * np.pi)  # within the original context
        kept_H = np.clip((turns_H - low) / (high - low), 0, 1)
        frequencies_H = frequencies_H * (kept_H + (1 - kept_H) / factor)
    angles_B1TH = positions_BT[:, None, :, None].astype(jnp.float32) * frequencies_H.astype(np.float32)
    return jnp.cos(angles_B1TH), jnp.sin(angles_B1TH)


def _rotate(x_BNTD: jax.Array, cos_B1TH: jax.Array, sin_B1TH: jax.Array) -> jax.Array:
    first, second = jnp.split(x_BNTD.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos_B1TH - second * sin_B1TH, second * cos_B1TH + first * sin_B1TH], axis=-1)
    return rotated.astype(x_BNTD.dtype)


def _splash(q_BNTD: jax.Array, k_BKTD: jax.Array, v_BKTD: jax.Array, segments_BT: jax.Array, interpret: bool):
    num_heads, length = q_BNTD.shape[1:3]
    block, compute = min(1024, length), min(512, length)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * num_heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=compute,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=compute,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        interpret=interpret,
    )
    segments = splash.SegmentIds(segments_BT, segments_BT)
    if interpret:  # the interpreter has no rule for one more grid dim
        return lax.map(lambda one: kernel(*one), (q_BNTD, k_BKTD, v_BKTD, segments))
    return jax.vmap(kernel)(q_BNTD, k_BKTD, v_BKTD, segments)


def _layer(x_BTE: jax.Array, shards: Params, rope: Any, segments_BT: jax.Array, h: ScanHyperparameters) -> jax.Array:
    p = {name: _gather(shard, h.compute_dtype) for name, shard in shards.items()}
    batch, length, _ = x_BTE.shape

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(batch, length, -1, h.head_dim).swapaxes(1, 2)

    y_BTE = _norm(x_BTE, p["attention_norm"], h.norm_eps)
    q_BNTD = _rotate(heads(y_BTE @ p["q"]), *rope) * h.head_dim**-0.5
    k_BKTD, v_BKTD = _rotate(heads(y_BTE @ p["k"]), *rope), heads(y_BTE @ p["v"])
    out_BNTD = _splash(q_BNTD, k_BKTD, v_BKTD, segments_BT, h.interpret)
    x_BTE = x_BTE + out_BNTD.swapaxes(1, 2).reshape(batch, length, -1) @ p["out"]
    y_BTE = _norm(x_BTE, p["feed_forward_norm"], h.norm_eps)
    return x_BTE + (jax.nn.silu(y_BTE @ p["gate"]) * (y_BTE @ p["up"])) @ p["down"]


def _loss_sum(params: Params, batch: Batch, h: ScanHyperparameters) -> jax.Array:
    """The sum of the cross-entropies of one device's labelled tokens (labels other than -100)."""
    rope, segments_BT = _rope_tables(batch["positions"], h), batch["segment_ids"]

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    def body(x_BTE: jax.Array, shards: Params) -> tuple[jax.Array, None]:
        return _layer(x_BTE, shards, rope, segments_BT, h), None

    x_BTE = _gather(params["embedding"], h.compute_dtype)[batch["tokens"]]
    x_BTE, _ = lax.scan(body, x_BTE, params["layers"])
    x_ME = _norm(x_BTE, _gather(params["norm"], h.compute_dtype), h.norm_eps).reshape(-1, h.dim)
    labels_M = batch["labels"].reshape(-1)
    counted_M = labels_M != -100
    loss = _cross_entropy if h.loss_chunks == 1 else functools.partial(_chunked_cross_entropy, h.loss_chunks)
    losses_M = loss(x_ME, _gather(params["head"], h.compute_dtype), jnp.where(counted_M, labels_M, 0))
    return jnp.sum(jnp.where(counted_M, losses_M, 0.0))


@jax.custom_vjp
def _cross_entropy(x_ME: jax.Array, head_VE: jax.Array, labels_M: jax.Array) -> jax.Array:
    return _cross_entropy_forward(x_ME, head_VE, labels_M)[0]


def _cross_entropy_forward(x_ME: jax.Array, head_VE: jax.Array, labels_M: jax.Array) -> tuple[jax.Array, Any]:
    logits_MV = x_ME @ head_VE.T
    normalizer_M = jax.nn.logsumexp(logits_MV.astype(jnp.float32), axis=-1)
    chosen_M = jnp.take_along_axis(logits_MV, labels_M[:, None], axis=-1)[:, 0].astype(jnp.float32)
    return normalizer_M - chosen_M, (x_ME, head_VE, logits_MV, normalizer_M, labels_M)


def _cross_entropy_backward(saved: Any, grad_M: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_ME, head_VE, logits_MV, normalizer_M, labels_M = saved
    grad_MV = _logits_gradient(logits_MV, normalizer_M, labels_M, grad_M).astype(logits_MV.dtype)
    return grad_MV @ head_VE, grad_MV.T @ x_ME, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _logits_gradient(
    logits_Mv: jax.Array, normalizer_M: jax.Array, labels_M: jax.Array, grad_M: jax.Array
) -> jax.Array:
    is_label_Mv = lax.broadcasted_iota(jnp.int32, logits_Mv.shape, 1) == labels_M[:, None]
    return (jnp.exp(logits_Mv.astype(jnp.float32) - normalizer_M[:, None]) - is_label_Mv) * grad_M[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_cross_entropy(num_chunks: int, x_ME: jax.Array, head_VE: jax.Array, labels_M: jax.Array) -> jax.Array:
    return _chunked_forward(num_chunks, x_ME, head_VE, labels_M)[0]


def _chunked_forward(
    num_chunks: int, x_ME: jax.Array, head_VE: jax.Array, labels_M: jax.Array
) -> tuple[jax.Array, Any]:
    chunks_CvE = head_VE.reshape(num_chunks, -1, head_VE.shape[1])
    size = chunks_CvE.shape[1]

    def body(carry: tuple[jax.Array, ...], chunk: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, ...], None]:
        max_M, sum_M, chosen_M = carry
        chunk_vE, start = chunk
        logits_Mv = jnp.matmul(x_ME, chunk_vE.T, preferred_element_type=jnp.float32)
        new_max_M = jnp.maximum(max_M, logits_Mv.max(-1))
        sum_M = sum_M * jnp.exp(max_M - new_max_M) + jnp.exp(logits_Mv - new_max_M[:, None]).sum(-1)
        is_label_Mv = lax.broadcasted_iota(jnp.int32, logits_Mv.shape, 1) == labels_M[:, None] - start
        return (new_max_M, sum_M, chosen_M + jnp.where(is_label_Mv, logits_Mv, 0).sum(-1)), None

    zeros_M = jnp.zeros(labels_M.shape, jnp.float32)
    starts_C = jnp.arange(num_chunks) * size
    (max_M, sum_M, chosen_M), _ = lax.scan(body, (zeros_M - jnp.inf, zeros_M, zeros_M), (chunks_CvE, starts_C))
    normalizer_M = max_M + jnp.log(sum_M)
    return normalizer_M - chosen_M, (x_ME, head_VE, normalizer_M, labels_M)


def _chunked_backward(num_chunks: int, saved: Any, grad_M: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_ME, head_VE, normalizer_M, labels_M = saved
    chunks_CvE = head_VE.reshape(num_chunks, -1, head_VE.shape[1])

    def body(grad_x_ME: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        chunk_vE, start = chunk
        logits_Mv = jnp.matmul(x_ME, chunk_vE.T, preferred_element_type=jnp.float32)
        grad_Mv = _logits_gradient(logits_Mv, normalizer_M, labels_M - start, grad_M).astype(x_ME.dtype)
        return grad_x_ME + jnp.matmul(grad_Mv, chunk_vE, preferred_element_type=jnp.float32), grad_Mv.T @ x_ME

    starts_C = jnp.arange(num_chunks) * chunks_CvE.shape[1]
    grad_x_ME, grads_CvE = lax.scan(body, jnp.zeros(x_ME.shape, jnp.float32), (chunks_CvE, starts_C))
    return grad_x_ME.astype(x_ME.dtype), grads_CvE.reshape(head_VE.shape), None


_chunked_cross_entropy.defvjp(_chunked_forward, _chunked_backward)


def _step(
    state: TrainState, batch: Batch, learning_rate: jax.Array, *, h: ScanHyperparameters
) -> tuple[TrainState, jax.Array]:
    """One device's part of a step."""
    num_tokens = jnp.maximum(lax.psum(jnp.sum(batch["labels"] != -100), AXIS), 1).astype(jnp.float32)
    loss, grads = jax.value_and_grad(lambda params: _loss_sum(params, batch, h) / num_tokens)(state.params)
    squares = sum(jnp.sum(grad * grad) for grad in jax.tree.leaves(grads))
    new_state = update(state, grads, jnp.sqrt(lax.psum(squares, AXIS)), learning_rate, h)
    return new_state, lax.psum(loss, AXIS)


@dataclasses.dataclass(frozen=True)
class ScanStep:
    """The step as JAX takes it.

    Attributes:
      jitted: `(state, batch, learning_rate) -> (state, loss)`; the state is donated.
      state: shapes, dtypes and shardings of the state.
      batch_sharding: of each tensor of a batch [B of all devices, T].
    """

    jitted: Any
    state: TrainState
    batch_sharding: NamedSharding


def scan_step(h: ScanHyperparameters, devices: Sequence[jax.Device]) -> ScanStep:
    """The step for these devices; nothing is compiled or allocated.

    Raises:
      ValueError: the number of devices does not divide a parameter's first dim, along which it is sharded.
    """
    mesh = Mesh(np.array(devices, dtype=object), (AXIS,))
    shapes = parameter_shapes(h)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    specs = jax.tree.map(lambda _: PartitionSpec(AXIS), shapes, is_leaf=is_shape)
    specs["layers"] = {name: PartitionSpec(None, AXIS) for name in shapes["layers"]}
    state_specs = TrainState(specs, specs, specs, PartitionSpec(), PartitionSpec())

    def abstract(shape: tuple[int, ...], spec: PartitionSpec, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        if shape and shape[len(spec) - 1] % len(devices):
            raise ValueError(
                f"{len(devices)} devices do not divide dim {len(spec) - 1} of a parameter of shape {shape}"
            )
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(abstract, shapes, specs, is_leaf=is_shape)
    counter = abstract((), PartitionSpec(), jnp.int32)
    batch_specs = dict.fromkeys(BATCH_TENSORS, PartitionSpec(AXIS))
    step = jax.shard_map(
        functools.partial(_step, h=h),
        mesh=mesh,
        in_specs=(state_specs, batch_specs, PartitionSpec()),
        out_specs=(state_specs, PartitionSpec()),
        check_vma=False,  # the kernel's results say nothing of the axes along which they differ
    )
    return ScanStep(
        jax.jit(step, donate_argnums=0),
        TrainState(params, params, params, counter, counter),
        NamedSharding(mesh, PartitionSpec(AXIS)),
    )
