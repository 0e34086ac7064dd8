"""Traces of a few training steps by `jax.profiler`, for TensorBoard's profile tab, xprof or Perfetto."""

import dataclasses
import os
from typing import Any, Self

from absl import logging

from titan.core.config.tree import option
from titan.core.config.validate import check_writable_folder


@dataclasses.dataclass(frozen=True)
class ProfilerConfig:
    """Which steps of a run are traced, and where the trace goes."""

    enable: bool = option(False, "Trace the steps start_step to start_step + num_steps - 1.")
    start_step: int = option(3, "First traced step. Earlier steps compile and warm up.", minimum=0)
    num_steps: int = option(2, "Number of traced steps.", minimum=1)
    folder: str = option("", "Folder of the traces. Empty: the folder profile within the run's folder.")

    def validate(self) -> None:
        """Raises ConfigError for a folder that cannot be written."""
        if self.folder:
            check_writable_folder("profiler.folder", self.folder)


class Profiler:
    """Starts and stops the trace as the loop passes its steps. Does nothing unless profiling is enabled.

    Use it as a context manager, or call `close()`: a run that ends inside the window still writes its trace.

        with Profiler(config.profiler, run_folder) as profiler:
            for step in steps:
                profiler.step(step, outputs)
                outputs = train_step(...)
    """

    def __init__(self, config: ProfilerConfig, folder: str, *, traces: bool = True):
        """Initializes the instance.

        Args:
        config: the section `profiler`; its `folder` overrides where traces go.
        folder: the run's folder.
        traces: whether this process is one that traces, of several commonly the first.
        """
        self.folder = os.path.expanduser(config.folder) or os.path.join(folder, "profile")
        self._first = config.start_step
        self._end = config.start_step + config.num_steps
        self._finished = not (config.enable and traces)
        self._tracing = False
        self._annotation = None

    def step(self, step: int, outputs: Any = None) -> None:
        """Tells the profiler that `step` begins.

        Args:
          step: number of the step about to run.
          outputs: arrays that the steps so far yield. The trace waits for them before it starts and before it stops,
            so that it holds the traced steps' device work, whole, although the loop runs ahead of the device.
        """
        if self._finished:
            return
        import jax

        self._end_annotation()
        if step >= self._end:
            if not self._tracing:
                logging.warning(
                    "profiler: the run begins at step %d, after the window that ends before step %d: "
                    "nothing is traced; raise --profiler.start_step",
                    step,
                    self._end,
                )
            self._stop(outputs)
            return
        if step >= self._first:
            if not self._tracing:
                jax.block_until_ready(outputs)
                os.makedirs(self.folder, exist_ok=True)
                jax.profiler.start_trace(self.folder)
                self._tracing = True
            self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._annotation.__enter__()

    def close(self, outputs: Any = None) -> None:
        """Ends a trace that is still open. May be called more than once."""
        self._end_annotation()
        self._stop(outputs)

    def _end_annotation(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None

    def _stop(self, outputs: Any) -> None:
        self._finished = True
        if self._tracing:
            import jax

            self._tracing = False
            try:
                jax.block_until_ready(outputs)
            finally:
                jax.profiler.stop_trace()
            logging.info("profiler: trace written to %s", self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
