"""AdamW as a pure function of tensors (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101)."""

import torch


def adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: torch.Tensor,
    learning_rate: torch.Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One update, in the order of operations of `torch.optim.AdamW`.

    Args:
      weight, grad, exp_avg, exp_avg_sq: tensors of one shape; any shard of a weight may be updated alone.
      step: 0-d float, the number of this update, from 1.
      learning_rate: 0-d float.

    Returns:
      The new weight and moments.
    """
    exp_avg = torch.lerp(exp_avg, grad, 1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + (1 - beta2) * (grad * grad)
    step_size = learning_rate / (1 - beta1**step)
    denominator = exp_avg_sq.sqrt() / (1 - beta2**step).sqrt() + epsilon
    weight = weight * (1 - learning_rate * weight_decay) - step_size * (exp_avg / denominator)
    return weight, exp_avg, exp_avg_sq
