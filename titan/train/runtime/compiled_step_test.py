"""A batch of another shape is a recompile, counted and logged with what changed."""

import logging

import numpy as np

from titan.train.runtime.compiled_step import CompiledStep


def _batch(num_rows: int, length: int = 8) -> dict[str, np.ndarray]:
    return {
        "tokens": np.zeros((1, num_rows, length), np.int32),
        "labels": np.zeros((1, num_rows, length), np.int32),
        "learning_rate": np.float32(1),
    }


def test_each_new_shape_is_compiled_once_and_named_in_the_log(caplog):
    compiled = []

    def compile_for(shapes):
        compiled.append(shapes)
        return object()

    step = CompiledStep("train_step", compile_for)
    with caplog.at_level(logging.WARNING):
        first = step.executable_for(_batch(4))
        assert step.executable_for(_batch(4)) is first
        assert (step.recompiles, caplog.messages) == (0, [])

        second = step.executable_for(_batch(2))
        assert second is not first
        assert step.recompiles == 1
        assert caplog.messages == [
            "recompiling train_step (1): labels (1, 4, 8) -> (1, 2, 8), tokens (1, 4, 8) -> (1, 2, 8)"
        ]

        assert step.executable_for(_batch(4)) is first
        assert step.executable_for(_batch(2)) is second
        assert step.recompiles == 1

        step.executable_for(_batch(2, length=16))
        assert step.recompiles == 2
        assert caplog.messages[1:] == [
            "recompiling train_step (2): labels (1, 2, 8) -> (1, 2, 16), tokens (1, 2, 8) -> (1, 2, 16)"
        ]
    assert compiled[0] == {"tokens": (1, 4, 8), "labels": (1, 4, 8), "learning_rate": ()}
    assert len(compiled) == 3
