"""The peer of full size in JAX trains titan's model: the losses are PyTorch's over several steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titan.graph.testing.xla_cpu import use_cpu_devices
from titan.models.llama3.config import Llama3Config
from titan.train.config.run import Config
from tools.bench.aot_vs_jax import hyperparameters
from tools.bench.jax_llama3 import TrainState
from tools.bench.jax_llama3_scan import parameter_shapes, scan_step
from tools.bench.torch_llama3 import TorchTrainer

_LENGTH = 128  # a block of the kernel
_RATE = 0.05
_MODEL = Llama3Config(
    vocab_size=64, dim=128, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=128, ffn_dim=24,
    rope_scaling="llama3", rope_original_max_length=64,
)  # fmt: skip
_CONFIG = dataclasses.replace(Config(), model=_MODEL)

_NAMES = {
    "attention_norm": "attention_norm",
    "q": "attention.wq",
    "k": "attention.wk",
    "v": "attention.wv",
    "out": "attention.wo",
    "feed_forward_norm": "feed_forward_norm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}

use_cpu_devices(8)


@pytest.fixture
def weights():
    random = np.random.default_rng(0)
    return {
        name: random.normal(float(weight.ndim == 1), 0.1, weight.shape).astype(np.float32)
        for name, weight in _MODEL.components().build().named_parameters()
    }


def _batch(seed):
    random = np.random.default_rng(seed)
    labels = random.integers(0, 64, (2, _LENGTH), dtype=np.int32)
    labels[0, 30:] = -100  # more labels on one device than on the other
    return {
        "tokens": random.integers(0, 64, (2, _LENGTH), dtype=np.int32),
        "labels": labels,
        "positions": np.tile(np.array([*range(50), *range(_LENGTH - 50)], np.int32), (2, 1)),
        "segment_ids": np.tile(np.array([1] * 50 + [2] * (_LENGTH - 50), np.int32), (2, 1)),
    }


def _stacked_params(named):
    """The peer's parameters from weights by fully qualified name, where matrices are [out, in]."""

    def stacked(name):
        return np.stack([named[f"layers.{index}.{name}.weight"].T for index in range(_MODEL.num_layers)])

    return {
        "embedding": named["embedding.weight"],
        "layers": {ours: stacked(name) for ours, name in _NAMES.items()},
        "norm": named["norm.weight"],
        "head": named["head.weight"],
    }


def _losses(step, weights, batches):
    params = _stacked_params(weights)
    state = TrainState(params, *(jax.tree.map(np.zeros_like, params) for _ in range(2)), np.int32(0), np.int32(0))
    state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, step.state))
    losses = []
    for batch in batches:
        state, loss = step.jitted(state, jax.device_put(batch, step.batch_sharding), np.float32(_RATE))
        losses.append(float(loss))
    return losses


def test_it_trains_as_pytorch_does(weights):
    batches = [_batch(seed) for seed in range(3)]
    torch_trainer = TorchTrainer(weights, _CONFIG, compiled=False)
    expected = [torch_trainer.step(batch, _RATE) for batch in batches]
    h = dataclasses.replace(hyperparameters(_CONFIG), compute_dtype=jnp.float32, interpret=True)
    # Sums in another order; the third loss has seen two updates by Adam, which divides gradients by their size.
    np.testing.assert_allclose(_losses(scan_step(h, jax.devices()[:2]), weights, batches), expected, atol=5e-4)
    assert expected[0] != pytest.approx(expected[-1], abs=1e-1)
    chunked = dataclasses.replace(h, loss_chunks=4)
    np.testing.assert_allclose(_losses(scan_step(chunked, jax.devices()[:1]), weights, batches), expected, atol=5e-4)


def test_it_has_as_many_parameters_as_titans():
    config = dataclasses.replace(_CONFIG, model=dataclasses.replace(_MODEL, head_dim=0, ffn_dim=40))
    shapes = parameter_shapes(hyperparameters(config))
    count = sum(np.prod(shape) for shape in jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple)))
    assert count == sum(weight.numel() for weight in config.model.components().build().parameters())


def test_a_dim_that_the_devices_do_not_divide_is_named():
    h = dataclasses.replace(hyperparameters(_CONFIG), vocab_size=63)
    with pytest.raises(ValueError, match=r"2 devices do not divide dim 0 of a parameter of shape \(63, 128\)"):
        scan_step(h, jax.devices()[:2])
