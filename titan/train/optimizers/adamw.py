"""AdamW as a pure function of tensors (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101)."""

import functools
from typing import Any

import torch

from titan.train.optimizers.optimizer import Optimizer


def make_adamw(config: Any) -> Optimizer:
    """AdamW with the settings of the section `optimizer` of a `titan.train.config.run.Config`."""
    settings = config.optimizer
    update = functools.partial(
        adamw,
        beta1=settings.beta1,
        beta2=settings.beta2,
        epsilon=settings.epsilon,
        weight_decay=settings.weight_decay,
    )
    return Optimizer(("exp_avg", "exp_avg_sq"), update)


def adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    state: tuple[torch.Tensor, ...],
    *,
    step: torch.Tensor,
    learning_rate: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """One update, in the order of operations of `torch.optim.AdamW`.

    Args:
      weight: any shard of a parameter.
      grad: its gradient.
      state: means of gradients and of their squares, of the same shape.
      step: 0-d float, the number of this update, from 1.
      learning_rate: 0-d float.
      beta1: decay of the mean of gradients.
      beta2: decay of the mean of their squares.
      epsilon: added to the root of the latter.
      weight_decay: decoupled, as a multiple of the learning rate.

    Returns:
      The new weight and moments.
    """
    exp_avg, exp_avg_sq = state
    exp_avg = torch.lerp(exp_avg, grad, 1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + (1 - beta2) * (grad * grad)
    step_size = learning_rate / (1 - beta1**step)
    denominator = exp_avg_sq.sqrt() / (1 - beta2**step).sqrt() + epsilon
    weight = weight * (1 - learning_rate * weight_decay) - step_size * (exp_avg / denominator)
    return weight, (exp_avg, exp_avg_sq)
