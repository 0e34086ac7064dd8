"""An optimizer: steps along the sign of a running mean of gradients (Bernstein et al., 2018, arXiv:1802.04434)."""

import functools

import torch
from torch import Tensor

from titan.train.config.run import Config
from titan.train.optimizers.optimizer import Optimizer


def make_signed_momentum(config: Config) -> Optimizer:
    """The optimizer with the settings of the section `optimizer`."""
    return Optimizer(("mean",), functools.partial(_update, beta=config.optimizer.beta1))


def _update(
    weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], *, step: Tensor, learning_rate: Tensor, beta: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    mean = torch.lerp(state[0], grad, 1 - beta)
    return weight - learning_rate * torch.sign(mean), (mean,)
