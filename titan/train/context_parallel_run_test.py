"""Runs with sequences split over devices, of both executors and from one another's checkpoint, equal one device."""

import pytest

from titan.train.run_for_test import TINY_FLAGS, Workplace, reported_losses

FLAGS = (
    *TINY_FLAGS,
    "--training.validation_interval=2",
    "--training.validation_batches=1",
    "--checkpoint.interval=2",
)
TOLERANCE = 1e-5  # float32 sums in another order


def _validation_losses(lines: list[str]) -> list[str]:
    return [line for line in lines if "validation_loss" in line]


def test_a_run_with_split_sequences_equals_one_device_and_goes_on_with_the_other_executor(tmp_path):
    workplace = Workplace(tmp_path)
    one = workplace.train("one", "--parallelism.num_devices=1", "--training.steps=4", defaults=FLAGS)
    split = workplace.train(
        "split",
        "--parallelism.num_devices=4",
        "--parallelism.context_parallel=2",
        "--training.steps=2",
        defaults=FLAGS,
    )
    assert any("dp_shard=2 x cp=2" in line for line in split.out)
    resumed = workplace.train(
        "split",
        "--parallelism.num_devices=2",
        "--parallelism.context_parallel=2",
        "--tpu_config.executor=torch",
        "--training.steps=4",
        defaults=FLAGS,
    )
    assert any("resumed from" in line for line in resumed.out)
    expected, got = (reported_losses(tmp_path / name) for name in ("one", "split"))
    assert sorted(got) == sorted(expected) == [1, 2, 3, 4]
    for step in expected:
        assert [*got[step]] == pytest.approx([*expected[step]], rel=TOLERANCE)
    assert _validation_losses([*split.out, *resumed.out]) == _validation_losses(one.out)
