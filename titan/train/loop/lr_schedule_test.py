"""Exact rates of each kind of schedule."""

import itertools
import math

import pytest

from titan.train.config.training import LrScheduleConfig, OptimizerConfig
from titan.train.loop.lr_schedule import learning_rate

PEAK = 2.0


def rates(num_steps, **fields):
    schedule = LrScheduleConfig(**fields)
    return [learning_rate(step, schedule, OptimizerConfig(learning_rate=PEAK), num_steps) for step in range(num_steps)]


def test_warmup_is_linear_and_reaches_the_peak():
    assert rates(4, kind="constant", warmup_steps=4) == [0.5, 1.0, 1.5, 2.0]


def test_linear_decay_ends_at_min_ratio():
    assert rates(6, kind="linear", warmup_steps=2, min_ratio=0.5) == [1.0, 2.0, 1.75, 1.5, 1.25, 1.0]


def test_cosine_decay_ends_at_min_ratio():
    expected = [2.0, 0.2 + 0.9 * (1 + math.cos(math.pi / 4)), 1.1, 0.2 + 0.9 * (1 + math.cos(3 * math.pi / 4)), 0.2]
    assert rates(5, kind="cosine", warmup_steps=1, min_ratio=0.1) == pytest.approx(expected, rel=1e-15)


def test_given_decay_steps_are_followed_by_the_final_rate():
    assert rates(6, kind="linear", warmup_steps=0, decay_steps=4, min_ratio=0.0) == [1.5, 1.0, 0.5, 0.0, 0.0, 0.0]


def test_decay_longer_than_the_run_is_cut_off():
    assert rates(2, kind="linear", warmup_steps=0, decay_steps=4, min_ratio=0.0) == [1.5, 1.0]


def test_constant_without_decay():
    assert rates(4, kind="constant", warmup_steps=1, decay_steps=0) == [2.0] * 4


def test_constant_decays_over_the_last_steps():
    assert rates(6, kind="constant", warmup_steps=2, decay_steps=2, min_ratio=0.5) == [1.0, 2.0, 2.0, 2.0, 1.5, 1.0]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_steps_after_the_run_keep_the_last_rate(kind):
    schedule = LrScheduleConfig(kind=kind, warmup_steps=1, decay_steps=2, min_ratio=0.25)
    assert learning_rate(50, schedule, OptimizerConfig(learning_rate=PEAK), 10) == pytest.approx(0.5, rel=1e-15)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 30])
def test_rises_until_the_end_of_warmup_and_never_after(kind, warmup_steps):
    values = rates(
        30, kind=kind, warmup_steps=warmup_steps, decay_steps=10 if kind == "constant" and warmup_steps < 20 else 0
    )
    changes = [after - before for before, after in itertools.pairwise(values)]
    peak_step = max(warmup_steps - 1, 0)
    assert all(change > 0 for change in changes[:peak_step])
    assert all(change <= 0 for change in changes[peak_step:])
    assert max(values) <= PEAK
