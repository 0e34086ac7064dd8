import glob
import io
import re

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan.core import metrics, sinks
from titan.core.metrics import MetricsConfig, MetricsLogger, resolve_peak, step_metrics
from titan.core.registry import Registry

_STEP = {
    "loss": 3.45671,
    "grad_norm": 0.987,
    "lr": 3e-3,
    "num_tokens": 2000,
    "step_seconds": 0.25,
    "data_wait_seconds": 0.0001,
    "skipped_updates": 2,
}


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _logger(folder, stream, **options):
    sizes = {"num_chips": 4, "flops_per_token": 1e9, "peak_flops_per_chip": 1e13}
    config = options.pop("config", MetricsConfig())
    return MetricsLogger(config, str(folder), stream=stream, **sizes, **options)


def _scalars(folder) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_step_metrics():
    values = step_metrics(
        num_tokens=2000, step_seconds=0.25, num_chips=4, flops_per_token=1e9, peak_flops_per_chip=1e13
    )
    assert values == {"tokens_per_second": 8000, "tokens_per_second_per_chip": 2000, "mfu": pytest.approx(0.2)}
    without_peak = step_metrics(
        num_tokens=2000, step_seconds=0.25, num_chips=4, flops_per_token=1e9, peak_flops_per_chip=0
    )
    assert "mfu" not in without_peak


def test_plain_line(tmp_path):
    stream = io.StringIO()
    with _logger(tmp_path, stream) as logger:
        reported = logger.log(12, _STEP)
        logger.log(12, {"validation_loss": 3.2})
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(
        r"step 12  loss 3\.4567  grad_norm 0\.987  lr 3\.0e-03  tokens/s 8,000  tok/s/chip 2,000  mfu 20\.0%  "
        r"(mem|rss) \d+\.\d GiB  data_wait 0\.1 ms  step_time 250 ms  skipped_updates 2",
        first,
    )
    assert second == "step 12  validation_loss 3.2000"
    assert reported["tokens_per_second"] == 8000


def test_terminal_line_has_the_same_words_in_colour(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = _Terminal()
    with _logger(tmp_path, stream) as logger:
        logger.log(1, {"loss": 1.5, "lr": 0.1})
    assert "\x1b[" in stream.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()) == "step 1  loss 1.5000  lr 1.0e-01\n"


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    with _logger(tmp_path, io.StringIO()) as logger:
        for step in (1, 2):
            logger.log(step, _STEP | {"loss": float(step)})
    scalars = _scalars(tmp_path)
    assert scalars["loss/train"] == [(1, 1.0), (2, 2.0)]
    assert scalars["speed/mfu"][0] == (1, pytest.approx(0.2))
    assert scalars["skipped_updates"] == [(1, 2.0), (2, 2.0)]
    assert "num_tokens" not in scalars
    assert any(tag.startswith("memory/") for tag in scalars)


def test_tensorboard_forgets_steps_that_a_resumed_run_does_again(tmp_path, monkeypatch):
    clock = iter(range(1_000_000, 2_000_000, 10))  # event files are read in the order of their second
    monkeypatch.setattr("time.time", lambda: next(clock))
    for resumed_step, loss in ((None, 1.0), (2, 2.0)):
        with _logger(tmp_path, io.StringIO(), resumed_step=resumed_step) as logger:
            for step in range(1 + (resumed_step or 0), 5):
                logger.log(step, {"loss": loss})
    assert _scalars(tmp_path)["loss/train"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_no_event_files_when_switched_off(tmp_path):
    with _logger(tmp_path, io.StringIO(), config=MetricsConfig(tensorboard=False)) as logger:
        logger.log(1, {"loss": 1.0})
    assert glob.glob(str(tmp_path / "**"), recursive=True) == [f"{tmp_path}/"]


def test_interval(tmp_path):
    logger = _logger(tmp_path, io.StringIO(), config=MetricsConfig(log_interval=3, tensorboard=False))
    assert [step for step in range(1, 8) if logger.due(step)] == [3, 6]


class _Device:
    process_index = 0

    def __init__(self, device_kind):
        self.device_kind = device_kind


def test_peak_comes_from_flag_table_or_measurement(monkeypatch):
    assert resolve_peak(MetricsConfig(peak_tflops=2.0), [_Device("cpu")]) == metrics.Peak(2e12, 1, "flag")
    assert resolve_peak(MetricsConfig(), [_Device("TPU7x")] * 8) == metrics.Peak(2307e12, 4, "table")
    monkeypatch.setattr(metrics, "measured_matmul_peak", lambda num_devices: 3e9 * num_devices)
    assert resolve_peak(MetricsConfig(), [_Device("cpu")] * 2) == metrics.Peak(3e9, 2, "measured")


class _CountingDevice:
    def __init__(self, peak):
        self._peak = peak

    def memory_stats(self):
        return {"peak_bytes_in_use": self._peak}


def test_memory_is_the_devices_where_they_count_it(monkeypatch):
    monkeypatch.setattr("jax.local_devices", lambda: [_CountingDevice(5), _CountingDevice(7)])
    assert metrics.memory_metrics() == {"device_memory_bytes": 7.0}


class Recorder:
    """A sink that keeps what it is given."""

    made: "list[Recorder]" = []

    def __init__(self, folder, resumed_step):
        self.calls = [(folder, resumed_step)]
        Recorder.made.append(self)

    def log(self, step, values):
        self.calls.append((step, dict(values)))

    def log_image(self, step, name, pixels):
        self.calls.append((step, name, pixels.shape))

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


def test_a_sink_of_a_plugin_gets_what_the_terminal_does(monkeypatch, tmp_path):
    monkeypatch.setattr(sinks, "SINKS", Registry("metrics sink"))
    monkeypatch.setattr(metrics, "SINKS", sinks.SINKS)
    sinks.register_sink("recorder", f"{__name__}:Recorder")
    assert sinks.sink_names() == ("recorder",)
    config = MetricsConfig(tensorboard=False, sinks=("recorder",))
    speed = {"num_chips": 1, "flops_per_token": 1.0, "peak_flops_per_chip": 1.0}
    with MetricsLogger(config, str(tmp_path), resumed_step=3, stream=io.StringIO(), **speed) as logger:
        logger.log(4, {"loss": 2.5})
        logger.log_image(4, "samples", np.zeros((2, 3, 3), np.uint8))
        logger.flush()
    expected = [(str(tmp_path), 3), (4, {"loss": 2.5}), (4, "samples", (2, 3, 3)), "flush", "close"]
    assert Recorder.made[-1].calls == expected
