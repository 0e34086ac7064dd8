"""A Llama 3 training step written by hand in JAX, as the peer that titan's captured step is timed against.

It imports nothing of titan: parameters are a plain pytree of [in, out] matrices, the step is `jax.value_and_grad` and
AdamW, state is donated. Over several devices it is FSDP by `shard_map`: each parameter and its moments are sharded
along one dim, gathered before use, and the transpose of that gather reduce-scatters the gradient.

What was tried on two CPU cores with the debug size (6.0M parameters, 8 sequences of 256 tokens): CPU time of one step,
relative to that of the choice kept. On a machine with other load, so 0.02 means nothing.

    choice kept                                       alternative
    linear maps on [B T, E] matrices                  on [B, T, E]: 1.7 (XLA:CPU has a slow path for their gradients)
    weights [in, out]                                 [out, in]: 1.07 (the same, for gradients of wide outputs)
    one matrix for q, k and v and one for gate and up separate: 1.02
    a VJP of its own for cross-entropy                log-sum-exp minus logit: 1.02; log_softmax, one-hot: 1.02
    attention by products of [G T, D] and [S, D]      einsum on [B, T, K, G, D], jax.nn.dot_product_attention: 1.01
    layers unrolled                                   lax.scan over stacked layers: 1.03
    embedding gradient by scatter                     one-hot product: 1.03
    shard_map with all_gather (4 devices)             jit with sharding constraints on the gathered weights: 1.10, also
                                                      on the gradients: 1.10 (all-reduces instead of reduce-scatters)

Shapes: B batch, T query tokens, S key tokens, E model dim, N query heads, K key/value heads, G = N / K, D head dim,
H half of it, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "fsdp"
_MASKED = -1e30  # finite: a fully masked row must not become NaN

Params = dict[str, Any]
Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """Sizes of the model and constants of the optimizer.

    Attributes:
      max_grad_norm: the global norm that gradients are scaled down to.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float


class TrainState(NamedTuple):
    """Parameters, Adam's moments in the same structure, and the counters of done and of skipped updates."""

    params: Params
    exp_avg: Params
    exp_avg_sq: Params
    step: jax.Array
    skipped: jax.Array


def params_from_named(named: Mapping[str, np.ndarray], num_layers: int) -> Params:
    """The pytree of the model from weights by fully qualified name, where matrices are [out, in]."""

    def layer(index: int) -> Params:
        def matrix(*names: str) -> np.ndarray:
            return np.concatenate([named[f"layers.{index}.{name}.weight"].T for name in names], axis=1)

        return {
            "attention_norm": named[f"layers.{index}.attention_norm.weight"],
            "qkv": matrix("attention.wq", "attention.wk", "attention.wv"),
            "out": matrix("attention.wo"),
            "feed_forward_norm": named[f"layers.{index}.feed_forward_norm.weight"],
            "gate_up": matrix("feed_forward.w1", "feed_forward.w3"),
            "down": matrix("feed_forward.w2"),
        }

    return {
        "embedding": named["embedding.weight"],
        "layers": [layer(index) for index in range(num_layers)],
        "norm": named["norm.weight"],
        "head": named["head.weight"].T,
    }


def _linear(x_BTE: jax.Array, weight: jax.Array) -> jax.Array:
    batch, length, dim = x_BTE.shape
    return (x_BTE.reshape(batch * length, dim) @ weight).reshape(batch, length, -1)


def _norm(x_BTE: jax.Array, weight_E: jax.Array, eps: float) -> jax.Array:
    return x_BTE * lax.rsqrt(jnp.mean(x_BTE * x_BTE, -1, keepdims=True) + eps) * weight_E


def _rope_tables(positions_BT: jax.Array, h: Hyperparameters) -> tuple[jax.Array, jax.Array]:
    frequencies_H = h.rope_theta ** (-jnp.arange(0, h.head_dim, 2, dtype=jnp.float32) / h.head_dim)
    angles_B1TH = positions_BT[:, None, :, None].astype(jnp.float32) * frequencies_H
    return jnp.cos(angles_B1TH), jnp.sin(angles_B1TH)


def _rotate(x_BNTD: jax.Array, cos_B1TH: jax.Array, sin_B1TH: jax.Array) -> jax.Array:
    first, second = jnp.split(x_BNTD, 2, axis=-1)
    return jnp.concatenate([first * cos_B1TH - second * sin_B1TH, second * cos_B1TH + first * sin_B1TH], axis=-1)


def _attention(x_BTE: jax.Array, p: Params, rope: Any, mask_BTS: jax.Array, h: Hyperparameters) -> jax.Array:
    batch, length, _ = x_BTE.shape
    groups = h.num_heads // h.num_kv_heads

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(batch, length, -1, h.head_dim).swapaxes(1, 2)

    q_dim, kv_dim = h.num_heads * h.head_dim, h.num_kv_heads * h.head_dim
    q, k, v = jnp.split(_linear(x_BTE, p["qkv"]), [q_dim, q_dim + kv_dim], axis=-1)
    q_BNTD, k_BKSD, v_BKSD = _rotate(heads(q), *rope) * h.head_dim**-0.5, _rotate(heads(k), *rope), heads(v)
    q_BKRD = q_BNTD.reshape(batch, h.num_kv_heads, groups * length, h.head_dim)  # R: G query heads of T rows each
    scores = jnp.einsum("bkrd,bksd->bkrs", q_BKRD, k_BKSD).reshape(batch, h.num_heads, length, length)
    weights = jax.nn.softmax(jnp.where(mask_BTS[:, None], scores, _MASKED), axis=-1)
    out = jnp.einsum("bkrs,bksd->bkrd", weights.reshape(batch, h.num_kv_heads, groups * length, length), v_BKSD)
    out_BTNxD = out.reshape(batch, h.num_heads, length, h.head_dim).swapaxes(1, 2).reshape(batch, length, -1)
    return _linear(out_BTNxD, p["out"])


@jax.custom_vjp
def _cross_entropy(logits_BTV: jax.Array, labels_BT: jax.Array) -> jax.Array:
    return _cross_entropy_forward(logits_BTV, labels_BT)[0]


def _cross_entropy_forward(logits_BTV: jax.Array, labels_BT: jax.Array) -> tuple[jax.Array, Any]:
    normalizer_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    chosen_BT = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)[..., 0]
    return normalizer_BT - chosen_BT, (logits_BTV, normalizer_BT, labels_BT)


def _cross_entropy_backward(saved: Any, grad_BT: jax.Array) -> tuple[jax.Array, None]:
    logits_BTV, normalizer_BT, labels_BT = saved
    is_label_BTV = lax.broadcasted_iota(jnp.int32, logits_BTV.shape, 2) == labels_BT[..., None]
    return (jnp.exp(logits_BTV - normalizer_BT[..., None]) - is_label_BTV) * grad_BT[..., None], None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def loss_sum(params: Params, batch: Batch, h: Hyperparameters) -> jax.Array:
    """The sum of the cross-entropies of the labelled tokens (labels other than -100), in nats."""
    length = batch["tokens"].shape[1]
    rope = _rope_tables(batch["positions"], h)
    segments_BT = batch["segment_ids"]
    mask_BTS = jnp.tril(jnp.ones((length, length), bool)) & (segments_BT[:, :, None] == segments_BT[:, None, :])
    x_BTE = params["embedding"][batch["tokens"]]
    for p in params["layers"]:
        x_BTE = x_BTE + _attention(_norm(x_BTE, p["attention_norm"], h.norm_eps), p, rope, mask_BTS, h)
        y_BTE = _norm(x_BTE, p["feed_forward_norm"], h.norm_eps)
        gate, up = jnp.split(_linear(y_BTE, p["gate_up"]), 2, axis=-1)
        x_BTE = x_BTE + _linear(jax.nn.silu(gate) * up, p["down"])
    logits_BTV = _linear(_norm(x_BTE, params["norm"], h.norm_eps), params["head"])
    counted_BT = batch["labels"] != -100
    losses_BT = _cross_entropy(logits_BTV, jnp.where(counted_BT, batch["labels"], 0))
    return jnp.sum(jnp.where(counted_BT, losses_BT, 0.0))


def update(
    state: TrainState, grads: Params, grad_norm: jax.Array, learning_rate: jax.Array, h: Hyperparameters
) -> TrainState:
    """Clipping by the global norm, then AdamW; nothing changes where the norm is not finite."""
    finite = jnp.isfinite(grad_norm)
    scale = jnp.minimum(1.0, h.max_grad_norm / (grad_norm + 1e-6))
    step = state.step + 1
    correction1 = 1 - h.beta1 ** step.astype(jnp.float32)
    correction2 = 1 - h.beta2 ** step.astype(jnp.float32)

    def one(weight: jax.Array, grad: jax.Array, exp_avg: jax.Array, exp_avg_sq: jax.Array) -> tuple[jax.Array, ...]:
        grad = grad * scale
        new_avg = h.beta1 * exp_avg + (1 - h.beta1) * grad
        new_avg_sq = h.beta2 * exp_avg_sq + (1 - h.beta2) * grad * grad
        direction = (new_avg / correction1) / (jnp.sqrt(new_avg_sq / correction2) + h.epsilon)
        new_weight = weight - learning_rate * (direction + h.weight_decay * weight)
        new, old = (new_weight, new_avg, new_avg_sq), (weight, exp_avg, exp_avg_sq)
        return tuple(jnp.where(finite, after, before) for after, before in zip(new, old, strict=True))

    triples = jax.tree.map(one, state.params, grads, state.exp_avg, state.exp_avg_sq)
    params, exp_avg, exp_avg_sq = jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0, 0, 0)), triples)
    skipped = state.skipped + (~finite).astype(jnp.int32)
    return TrainState(params, exp_avg, exp_avg_sq, jnp.where(finite, step, state.step), skipped)


def _step(
    state: TrainState, batch: Batch, learning_rate: jax.Array, *, specs: Params | None, h: Hyperparameters
) -> tuple[TrainState, jax.Array]:
    """One device's part of a step; `specs` are the shardings of the parameters, None on one device."""

    def total(x: jax.Array) -> jax.Array:
        return x if specs is None else lax.psum(x, AXIS)

    def gathered(params: Params) -> Params:
        if specs is None:
            return params
        return jax.tree.map(lambda p, spec: lax.all_gather(p, AXIS, axis=len(spec) - 1, tiled=True), params, specs)

    num_tokens = jnp.maximum(total(jnp.sum(batch["labels"] != -100)), 1).astype(jnp.float32)
    loss, grads = jax.value_and_grad(lambda params: loss_sum(gathered(params), batch, h) / num_tokens)(state.params)
    grad_norm = jnp.sqrt(total(sum(jnp.sum(grad * grad) for grad in jax.tree.leaves(grads))))
    return update(state, grads, grad_norm, learning_rate, h), total(loss)


def _spec(shape: tuple[int, ...], num_devices: int) -> PartitionSpec:
    for dim, size in enumerate(shape):
        if size % num_devices == 0:
            return PartitionSpec(*[None] * dim, AXIS)
    raise ValueError(f"no dim of a parameter of shape {shape} is divisible by {num_devices} devices")


class JaxTrainer:
    """The compiled step and its state on the first `num_devices` devices."""

    def __init__(
        self, named: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray], h: Hyperparameters, num_devices: int
    ):
        """Compiles the step.

        Args:
          named: initial weights by fully qualified name, matrices [out, in].
          batch: a batch of the shapes to come: int32 [B, T] for tokens, labels, positions and segment_ids.
          h: sizes and constants.
          num_devices: 1, or the number of devices to shard over.
        """
        mesh = Mesh(np.array(jax.devices()[:num_devices]), (AXIS,))
        params = params_from_named(named, h.num_layers)
        split = num_devices > 1
        param_specs = jax.tree.map(lambda p: _spec(p.shape, num_devices), params) if split else None
        step = functools.partial(_step, specs=param_specs, h=h)
        replicated = NamedSharding(mesh, PartitionSpec())
        self._batch_sharding = replicated
        state_shardings: Any = replicated
        if split:
            state_specs = TrainState(param_specs, param_specs, param_specs, PartitionSpec(), PartitionSpec())
            step = jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(state_specs, PartitionSpec(AXIS), PartitionSpec()),
                out_specs=(state_specs, PartitionSpec()),
            )
            self._batch_sharding = NamedSharding(mesh, PartitionSpec(AXIS))
            state_shardings = jax.tree.map(
                lambda spec: NamedSharding(mesh, spec), state_specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
            )
        zeros = jax.tree.map(np.zeros_like, params)
        self.state = jax.device_put(
            TrainState(params, zeros, jax.tree.map(np.zeros_like, params), np.int32(0), np.int32(0)), state_shardings
        )
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(state_shardings, replicated))
        self._compiled = jitted.lower(self.state, self._place(batch), np.float32(0)).compile()

    def _place(self, batch: Mapping[str, np.ndarray]) -> Batch:
        return jax.device_put(dict(batch), self._batch_sharding)

    def step(self, batch: Mapping[str, np.ndarray], learning_rate: float) -> float:
        """One training step, waited for; returns the loss before the update."""
        self.state, loss = self._compiled(self.state, self._place(batch), np.float32(learning_rate))
        jax.block_until_ready(self.state)
        return float(loss)
