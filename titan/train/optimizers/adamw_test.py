"""AdamW against PyTorch's own."""

import dataclasses

import pytest
import torch

from titan.train.config.run import Config
from titan.train.optimizers.registry import make_optimizer


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_steps_are_those_of_torch(weight_decay):
    config = Config()
    settings = dataclasses.replace(config.optimizer, weight_decay=weight_decay, beta1=0.8, beta2=0.9, epsilon=1e-6)
    optimizer = make_optimizer(dataclasses.replace(config, optimizer=settings))
    torch.manual_seed(0)
    expected = torch.nn.Parameter(torch.randn(7, 5, dtype=torch.float64))
    reference = torch.optim.AdamW([expected], lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=weight_decay)
    weight = expected.detach().clone()
    state = tuple(torch.zeros_like(weight) for _ in optimizer.state)
    for step in range(1, 6):
        gradient = torch.randn_like(weight)
        expected.grad = gradient.clone()
        reference.step()
        arguments = {"step": torch.tensor(float(step)), "learning_rate": torch.tensor(1e-2)}
        weight, state = optimizer.update(weight, gradient, state, **arguments)
        # float64, but for step and learning rate: these are float32 in a training step.
        torch.testing.assert_close(weight, expected.detach(), rtol=1e-6, atol=1e-7)
