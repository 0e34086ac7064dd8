"""Runs with sequences split over devices, of either executor and without capture, go on from another's checkpoint."""

import pytest

from titan.train.testing.runs import TINY_FLAGS, Workplace, reported_losses

FLAGS = (
    *TINY_FLAGS,
    "--training.validation_interval=1",
    "--training.validation_batches=1",
)
TOLERANCE = 1e-5  # float32 sums in another order


def _validation_losses(lines: list[str]) -> list[str]:
    return [line for line in lines if "validation_loss" in line]


def test_a_run_with_split_sequences_equals_one_device_and_goes_on_with_the_other_executor(tmp_path):
    workplace = Workplace(tmp_path)

    def train(run: str, num_devices: int, *flags: str) -> list[str]:
        return workplace.train(run, f"--parallelism.num_devices={num_devices}", *flags, defaults=FLAGS).out

    one = train("one", 1, "--training.steps=4")
    split = "--parallelism.context_parallel=2"
    lines = train("split", 4, split, "--training.steps=2")
    assert any("dp_shard=2 x cp=2" in line for line in lines)
    eager = ("--tpu_config.use_graph_trainer=false", "--compile.enable=false")
    for steps, flags in ((3, ("--tpu_config.executor=torch",)), (4, eager)):
        resumed = train("split", 2, split, f"--training.steps={steps}", *flags)
        assert any("resumed from" in line for line in resumed)
        lines += resumed
    expected, got = (reported_losses(tmp_path / name) for name in ("one", "split"))
    assert sorted(got) == sorted(expected) == [1, 2, 3, 4]
    for step in expected:
        assert [*got[step]] == pytest.approx([*expected[step]], rel=TOLERANCE)
    assert _validation_losses(lines) == _validation_losses(one) != []
