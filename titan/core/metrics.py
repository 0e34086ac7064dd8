"""What a run reports each step: derived speeds, a line on the terminal, and scalars for TensorBoard."""

import dataclasses
import io
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TextIO

from titan.core.config.tree import option
from titan.core.hardware import find_hardware, measured_matmul_peak, num_chips
from titan.core.sinks import SINKS, Sink, sink_names

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """How often and where metrics are reported, and what MFU is measured against."""

    log_interval: int = option(1, "Report every this many steps.", minimum=1)
    tensorboard: bool = option(True, "Write TensorBoard event files into the folder tensorboard of the run.")
    sinks: tuple[str, ...] = option(
        (), "Further places that metrics go to, of those that plugins add.", choices=sink_names
    )
    peak_tflops: float = option(
        0.0,
        "Peak of one chip in TFLOP/s, for MFU. 0: the hardware table, or, for a device it does not list, a measured "
        "matmul peak.",
        minimum=0.0,
    )


@dataclasses.dataclass(frozen=True)
class Peak:
    """The speed that MFU is a fraction of.

    Attributes:
      flops_per_chip: peak FLOP/s of one chip.
      num_chips: chips of the run.
      source: "flag", "table" or "measured".
    """

    flops_per_chip: float
    num_chips: int
    source: str


def resolve_peak(config: MetricsConfig, devices: list | None = None) -> Peak:
    """The peak for `devices` (default: all JAX devices): the flag's, the table's, or one measured here (about 0.5 s).

    A measured peak is that of this process's devices together, divided among them, since virtual devices share cores.
    """
    import jax

    devices = jax.devices() if devices is None else devices
    kind = devices[0].device_kind
    chips = num_chips(len(devices), kind)
    if config.peak_tflops > 0:
        return Peak(config.peak_tflops * 1e12, chips, "flag")
    hardware = find_hardware(kind)
    if hardware is not None:
        return Peak(hardware.peak_bf16_flops, chips, "table")
    num_local = sum(device.process_index == jax.process_index() for device in devices)
    return Peak(measured_matmul_peak(num_local) / num_local, chips, "measured")


def step_metrics(
    *, num_tokens: float, step_seconds: float, num_chips: int, flops_per_token: float, peak_flops_per_chip: float
) -> dict[str, float]:
    """Speeds of one step, all chips together.

    Args:
      num_tokens: tokens that the step trained on, over all devices.
      step_seconds: wall time of the step.
      num_chips: chips that ran it.
      flops_per_token: FLOPs the model needs per token, forward and backward, never recompute.
      peak_flops_per_chip: peak FLOP/s of one chip; 0 leaves MFU out.

    Returns:
      `tokens_per_second`, `tokens_per_second_per_chip` and `mfu` (a fraction; Chowdhery et al., PaLM, 2022,
      appendix B).
    """
    tokens_per_second = num_tokens / step_seconds
    metrics = {
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_chip": tokens_per_second / num_chips,
    }
    if peak_flops_per_chip > 0:
        metrics["mfu"] = flops_per_token * tokens_per_second / (num_chips * peak_flops_per_chip)
    return metrics


def memory_metrics() -> dict[str, float]:
    """Memory in bytes, by the name of the metric.

    `device_memory_bytes` is the highest peak among local devices. Where devices keep no count (CPU),
    `process_memory_bytes` is this process's resident memory.
    """
    import jax

    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    peaks = [peak for peak in peaks if peak is not None]
    if peaks:
        return {"device_memory_bytes": float(max(peaks))}
    import psutil

    return {"process_memory_bytes": float(psutil.Process().memory_info().rss)}


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.01 else f"{1e3 * seconds:,.0f} ms"


def _gibibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


# Metric -> (label on the terminal, TensorBoard tag, format), in the order of the line. Others follow by name.
_FIELDS: dict[str, tuple[str, str, Callable[[float], str]]] = {
    "loss": ("loss", "loss/train", "{:.4f}".format),
    "validation_loss": ("validation_loss", "loss/validation", "{:.4f}".format),
    "sample_distance": ("sample_distance", "samples/distance", "{:.2f}".format),
    "grad_norm": ("grad_norm", "grad_norm", "{:.3f}".format),
    "lr": ("lr", "lr", "{:.1e}".format),
    "auxiliary_loss": ("aux_loss", "loss/auxiliary", "{:.4f}".format),
    "expert_load_max": ("load_max", "experts/load_max", "{:.2f}".format),
    "expert_load_worst": ("load_worst", "experts/load_worst", "{:.2f}".format),
    "router_entropy": ("entropy", "experts/router_entropy", "{:.3f}".format),
    "dropped_fraction": ("dropped", "experts/dropped_fraction", "{:.2%}".format),
    "tokens_per_second": ("tokens/s", "speed/tokens_per_second", "{:,.0f}".format),
    "tokens_per_second_per_chip": ("tok/s/chip", "speed/tokens_per_second_per_chip", "{:,.0f}".format),
    "mfu": ("mfu", "speed/mfu", "{:.1%}".format),
    "device_memory_bytes": ("mem", "memory/device_peak_bytes", _gibibytes),
    "process_memory_bytes": ("rss", "memory/process_resident_bytes", _gibibytes),
    "data_wait_seconds": ("data_wait", "time/data_wait_seconds", _milliseconds),
    "step_seconds": ("step_time", "time/step_seconds", _milliseconds),
}
_INPUTS_ONLY = ("num_tokens",)


def format_metrics(values: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, text) pairs for the terminal, known metrics first and in a fixed order."""
    known = [(label, form(values[name])) for name, (label, _, form) in _FIELDS.items() if name in values]
    rest = [(name, f"{values[name]:.6g}") for name in values if name not in _FIELDS and name not in _INPUTS_ONLY]
    return known + rest


class MetricsLogger:
    """Reports metrics on the terminal and to TensorBoard. Meant for one process of a run, commonly the first.

    A terminal gets coloured lines (rich), a file or pipe plain ones:
    `step 12  loss 3.4567  grad_norm 0.987  lr 3.0e-03  tokens/s 12,345  ...`.
    """

    def __init__(
        self,
        config: MetricsConfig,
        folder: str,
        *,
        num_chips: int,
        flops_per_token: float,
        peak_flops_per_chip: float,
        resumed_step: int | None = None,
        stream: TextIO | None = None,
    ):
        """Initializes the instance.

        Args:
        config: the section `metrics`.
        folder: the run's folder; event files go into `tensorboard` within it.
        num_chips: chips of the whole run.
        flops_per_token: see `step_metrics`.
        peak_flops_per_chip: FLOP/s, e.g. `resolve_peak(config).flops_per_chip`.
        resumed_step: the checkpoint's step when the run resumes; TensorBoard then drops what a killed run had
          reported after it.
        stream: where lines go; default standard output.
        """
        self._log_interval = config.log_interval
        self._speed = {
            "num_chips": num_chips,
            "flops_per_token": flops_per_token,
            "peak_flops_per_chip": peak_flops_per_chip,
        }
        self._stream = stream if stream is not None else sys.stdout
        self._console = _make_console(self._stream)
        self.tensorboard_folder = os.path.join(folder, "tensorboard") if config.tensorboard else None
        self._sinks: list[Sink] = [_EventFile(self.tensorboard_folder, resumed_step)] if config.tensorboard else []
        self._sinks += [SINKS[name](folder=folder, resumed_step=resumed_step) for name in config.sinks]

    def due(self, step: int) -> bool:
        """Whether the interval asks for a report of `step`; the loop need not fetch other steps' values."""
        return step % self._log_interval == 0

    def log(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Reports `values` of `step`, at once and whatever the interval.

        When `num_tokens` and `step_seconds` are among them, `step_metrics` and `memory_metrics` are added.

        Args:
          step: number of the step.
          values: metric name -> Python float or 0-dim array that is ready. Names such as `loss`, `grad_norm`, `lr`,
            `validation_loss`, `data_wait_seconds`, `step_seconds` have a format and unit of their own; any other name
            is printed as it is.

        Returns:
          What was reported, the added metrics included.
        """
        values = {name: float(value) for name, value in values.items()}
        if "num_tokens" in values and "step_seconds" in values:
            speeds = step_metrics(num_tokens=values["num_tokens"], step_seconds=values["step_seconds"], **self._speed)
            values |= speeds | memory_metrics()
        self._print(step, format_metrics(values))
        for sink in self._sinks:
            sink.log(step, values)
        return values

    def log_image(self, step: int, name: str, pixels: "np.ndarray") -> None:
        """Writes an image to TensorBoard and other sinks, whatever the interval.

        Args:
          step: number of the step.
          name: of the image, the same in every step.
          pixels: uint8 [height, width, 3].
        """
        for sink in self._sinks:
            sink.log_image(step, name, pixels)

    def flush(self) -> None:
        """Writes what is buffered: if the process is killed now, these steps are not missing."""
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Writes what is buffered and closes all sinks. May be called more than once."""
        while self._sinks:
            self._sinks.pop().close()

    def _print(self, step: int, pairs: list[tuple[str, str]]) -> None:
        pairs = [("step", str(step)), *pairs]
        if self._console is None:
            print("  ".join(f"{label} {text}" for label, text in pairs), file=self._stream, flush=True)
            return
        from rich.text import Text

        line = Text("  ").join(Text.assemble((label, "dim"), " ", (text, "bold")) for label, text in pairs)
        self._console.print(line, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _make_console(stream: TextIO) -> Any:
    """A rich console when the stream is a terminal, else None."""
    if not stream.isatty():
        return None
    from rich.console import Console

    return Console(file=stream, highlight=False)


class _EventFile(Sink):
    """TensorBoard's own event writer (no TensorFlow, no torch), one scalar per metric."""

    def __init__(self, folder: str, resumed_step: int | None):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event_pb2, self._summary_pb2 = event_pb2, summary_pb2
        self._writer = EventFileWriter(folder, flush_secs=10)
        if resumed_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=resumed_step + 1, session_log=start))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [
            self._summary_pb2.Summary.Value(tag=_FIELDS[name][1] if name in _FIELDS else name, simple_value=value)
            for name, value in values.items()
            if name not in _INPUTS_ONLY
        ]
        summary = self._summary_pb2.Summary(value=scalars)
        self._writer.add_event(self._event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    def log_image(self, step: int, name: str, pixels: "np.ndarray") -> None:
        import PIL.Image

        png = io.BytesIO()
        PIL.Image.fromarray(pixels).save(png, "PNG")
        height, width, num_channels = pixels.shape
        image = self._summary_pb2.Summary.Image(
            height=height, width=width, colorspace=num_channels, encoded_image_string=png.getvalue()
        )
        summary = self._summary_pb2.Summary(value=[self._summary_pb2.Summary.Value(tag=name, image=image)])
        self._writer.add_event(self._event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
