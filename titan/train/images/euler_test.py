"""Sampling: the published times, and that straight flows are followed exactly."""

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from titan.train.images.euler import euler, sampling_times


@pytest.mark.parametrize(("num_steps", "image_length"), [(28, 4096), (4, 256), (7, 1024)])
@pytest.mark.parametrize("schedule", ["shifted", "uniform"])
def test_times_are_those_of_diffusers(num_steps, image_length, schedule):
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        max_image_seq_len=4096,
        base_shift=0.5,
        max_shift=1.15,
        shift=1.0 if schedule == "uniform" else 3.0,
        use_dynamic_shifting=schedule == "shifted",
    )
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=calculate_shift(image_length))
    times = sampling_times(num_steps, schedule=schedule, image_length=image_length)
    # float32 there
    np.testing.assert_allclose(times, scheduler.sigmas.numpy(), atol=1e-6)


def test_a_flow_along_straight_lines_ends_at_the_data():
    draw = np.random.default_rng(0)
    data, noise = (draw.standard_normal((3, 5, 2)).astype(np.float32) for _ in range(2))
    times = [sampling_times(6, schedule="shifted", image_length=length) for length in (100, 4096, 256)]
    seen = []

    def velocity(samples, now):
        seen.append(now)
        t = now[:, None, None]
        np.testing.assert_allclose(samples, (1 - t) * data + t * noise, atol=1e-5)
        return noise - data

    # Rounding of six sums in float32 of numbers of about 1.
    np.testing.assert_allclose(euler(velocity, noise, times), data, atol=1e-5)
    assert len(seen) == 6
    np.testing.assert_allclose(seen[3], [t[3] for t in times], rtol=1e-6)
