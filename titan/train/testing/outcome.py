"""What steps gave, and whether two of them gave the same."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the steps gave.

    Attributes:
      metrics: those of each step.
      gradients: parameter, layer by layer, to a tenth of its clipped gradient in the first step (the first moment).
      parameters: the same after the last step.
      expert_bias: after the last step, of a run that has one.
    """

    metrics: list[dict[str, float]]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    expert_bias: np.ndarray | None = None


def assert_same(got: Outcome, expected: Outcome, tolerance: float) -> None:
    """Metrics of every step within a relative tolerance; gradients and parameters of each tensor's largest value."""
    for step, expected_step in zip(got.metrics, expected.metrics, strict=True):
        for name, value in expected_step.items():
            assert abs(step[name] - value) <= tolerance * abs(value), (name, step[name], value)
    for kind in ("gradients", "parameters"):
        arrays, expected_arrays = getattr(got, kind), getattr(expected, kind)
        assert arrays.keys() == expected_arrays.keys()
        for name, array in expected_arrays.items():
            largest = np.abs(array).max()
            assert largest > 0, name
            assert np.abs(arrays[name] - array).max() <= tolerance * largest, (kind, name)
