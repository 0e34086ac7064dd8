"""The learning rate of each step: linear warm-up, then a cosine or linear decay, or none before the end (WSD)."""

import math

from titan.train.config.training import LrScheduleConfig, OptimizerConfig


def learning_rate(step: int, schedule: LrScheduleConfig, optimizer: OptimizerConfig, num_steps: int) -> float:
    """The learning rate of one optimizer step.

    Step `warmup_steps - 1` has the peak rate, and the last step of the decay exactly `min_ratio` times it, which stays
    the rate of any step after that. Warm-up, stable, decay (WSD) is kind "constant" with `decay_steps`
    (https://arxiv.org/abs/2404.06395).

    Args:
      step: number of the step, from 0.
      schedule: kind, lengths, and the ratio at the end.
      optimizer: gives the peak rate.
      num_steps: steps of the whole run.
    """
    done = step + 1  # steps finished once this one is
    peak = optimizer.learning_rate
    if done <= schedule.warmup_steps:
        return peak * done / schedule.warmup_steps
    if schedule.kind == "constant":
        decay_start, decay_steps = num_steps - schedule.decay_steps, schedule.decay_steps
    else:
        decay_start, decay_steps = schedule.warmup_steps, schedule.decay_steps or num_steps - schedule.warmup_steps
    if done <= decay_start or decay_steps == 0:
        return peak
    progress = min((done - decay_start) / decay_steps, 1.0)
    if schedule.kind == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        remaining = 1 - progress
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * remaining)
