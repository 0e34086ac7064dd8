"""Rectified flow from noise to data by Euler's method: the times, and the steps.

The time is 1 at the noise and 0 at the data, and the velocity is the derivative of the sample by it.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

# FLUX.1-dev shifts by mu, linear in the tokens of an image between these points (tokens, mu).
_SHORT, _LONG = (256, 0.5), (4096, 1.15)


def sampling_times(num_steps: int, *, schedule: str, image_length: int) -> np.ndarray:
    """float64 [num_steps + 1] times from 1 down to 0.

    Args:
      num_steps: of the method.
      schedule: `uniform`, or `shifted` by t -> e^mu / (e^mu + 1/t - 1), as FLUX.1-dev samples.
      image_length: tokens of the image, of which mu is a function.
    """
    times = np.linspace(1.0, 0.0, num_steps + 1)
    if schedule == "uniform":
        return times
    slope = (_LONG[1] - _SHORT[1]) / (_LONG[0] - _SHORT[0])
    factor = math.exp(_SHORT[1] + slope * (image_length - _SHORT[0]))
    # The same as the formula, and 0 at 0.
    return factor * times / (factor * times + 1.0 - times)


def euler(
    velocity: Callable[[np.ndarray, np.ndarray], np.ndarray], noise: np.ndarray, times: Sequence[np.ndarray]
) -> np.ndarray:
    """The samples that a velocity field makes of noise.

    Args:
      velocity: (samples, times [num_samples]) to the velocities, of the samples' shape.
      noise: float32 [num_samples, ...].
      times: those of each sample, equally many.
    """
    samples, shape = noise, (-1, *(1,) * (noise.ndim - 1))
    by_step = np.stack(times, axis=1)  # [num_steps + 1, num_samples]
    for now, after in zip(by_step[:-1], by_step[1:], strict=True):
        change = (after - now).astype(np.float32).reshape(shape)
        samples = samples + change * velocity(samples, now.astype(np.float32))
    return samples
