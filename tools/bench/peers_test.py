"""The hand-written JAX step, PyTorch and Hugging Face train the same model: same losses over several steps."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

from titan.graph.testing.xla_cpu import use_cpu_devices
from titan.models.llama3.config import Llama3Config
from titan.train.config.run import Config
from tools.bench.hf_parity import one_document
from tools.bench.hf_trainer import HfTrainer
from tools.bench.interleaved import max_difference, medians, ratios
from tools.bench.jax_llama3 import Hyperparameters, JaxTrainer
from tools.bench.torch_llama3 import TorchTrainer
from tools.bench.worker import Turn

_MODEL = Llama3Config(vocab_size=64, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24)
_HYPERPARAMETERS = Hyperparameters(
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, norm_eps=1e-5, rope_theta=500_000.0,
    beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, max_grad_norm=1.0,
)  # fmt: skip

use_cpu_devices(8)


@pytest.fixture
def weights():
    random = np.random.default_rng(0)
    model = _MODEL.components().build()
    return {
        name: random.normal(1.0 if weight.ndim == 1 else 0.0, 0.3, weight.shape).astype(np.float32)
        for name, weight in model.named_parameters()
    }


def _batch(seed):
    random = np.random.default_rng(seed)
    labels = random.integers(0, 64, (4, 12), dtype=np.int32)
    labels[0, 3:] = -100  # more labels on one device than on the other
    return {
        "tokens": random.integers(0, 64, (4, 12), dtype=np.int32),
        "labels": labels,
        "positions": np.tile(np.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], np.int32), (4, 1)),
        "segment_ids": np.tile(np.array([1] * 5 + [2] * 7, np.int32), (4, 1)),
    }


@pytest.mark.parametrize("num_devices", [1, 2])
def test_jax_and_torch_train_alike(weights, num_devices):
    batches = [_batch(seed) for seed in range(5)]
    torch_trainer = TorchTrainer(weights, dataclasses.replace(Config(), model=_MODEL), compiled=False)
    jax_trainer = JaxTrainer(weights, batches[0], _HYPERPARAMETERS, num_devices)
    expected = [torch_trainer.step(batch, 0.01) for batch in batches]
    losses = [jax_trainer.step(batch, 0.01) for batch in batches]
    # float32 over five steps: sums in another order, which differs between CPUs, gave 2.6e-6, and AdamW makes a step
    # of any size of a gradient near zero.
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=0)
    assert expected[0] != pytest.approx(expected[-1], abs=1e-2)
    assert int(jax_trainer.state.step) == len(batches) and int(jax_trainer.state.skipped) == 0


def test_hugging_face_and_torch_train_alike(weights, tmp_path):
    _MODEL.hf().save_hf({name: torch.from_numpy(value) for name, value in weights.items()}, _MODEL, str(tmp_path))
    batches = [one_document(_batch(seed)) for seed in range(3)]
    config = dataclasses.replace(Config(), model=_MODEL)
    torch_trainer = TorchTrainer(weights, config, compiled=False)
    hf_trainer = HfTrainer(str(tmp_path), config.optimizer, config.training.max_grad_norm, compiled=False)
    expected = [torch_trainer.step(batch, 0.01) for batch in batches]
    np.testing.assert_allclose([hf_trainer.step(batch, 0.01) for batch in batches], expected, atol=1e-5)


def test_a_ratio_is_of_steps_of_one_round():
    turns = {
        "ours": [Turn(seconds, 1.0, 0, 2.0) for seconds in (50, 9, 1, 2, 4)],
        "peer": [Turn(seconds, 2.0, 0, 2.5) for seconds in (99, 9, 3, 8, 8)],
    }
    assert ratios(turns, {"vs_peer": ("ours", "peer")})["vs_peer"] == 3  # of 3, 4 and 2; the warm-up does not count
    assert max_difference(turns, "ours") == 0.5
    assert medians(turns) == {"ours_step_s": 2, "ours_cpu_s": 1, "peer_step_s": 8, "peer_cpu_s": 2}


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_count(weights):
    weights["head.weight"][0, 0] = np.inf
    trainer = JaxTrainer(weights, _batch(0), _HYPERPARAMETERS, 1)
    before = jax.device_get(trainer.state)
    assert not np.isfinite(trainer.step(_batch(0), 0.01))
    after = jax.device_get(trainer.state)
    assert int(after.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, before._replace(skipped=after.skipped), after)
