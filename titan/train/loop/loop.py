"""The training loop: batches in, metrics and checkpoints out. It sees the step as one callable."""

import base64
import dataclasses
import logging
import math
import signal
import statistics
import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from titan.core.checkpoint import Checkpointer, CheckpointMismatchError
from titan.core.config.validate import ConfigError
from titan.core.metrics import MetricsLogger
from titan.core.profiler import Profiler
from titan.core.progress import duration
from titan.train.inputs.data import RunData
from titan.train.loop.lr_schedule import learning_rate
from titan.train.loop.stop import stop_requests
from titan.train.runtime.compiled_step import Executable
from titan.train.runtime.run import Run
from titan.train.sharding.token_order import in_mesh_order
from titan.train.step.state import EXPERT_BIAS, LEARNING_RATE, PARAMS, SKIPPED_STEPS

_log = logging.getLogger(__name__)

_STEPS_BEFORE_ESTIMATE = 2  # beside the first, which compiles


@dataclasses.dataclass
class Progress:
    """What the loop knows of the run; saved with each checkpoint, so that a resumed run goes on counting.

    Attributes:
      steps: steps done, skipped updates included.
      first_loss, last_loss, best_loss: of the training steps; NaN before the first.
      validation_loss: of the last validation; NaN before the first.
      sample_distance: of the images sampled last from those trained on; NaN before the first.
      skipped_steps: updates left out because the gradient was not finite.
    """

    steps: int = 0
    first_loss: float = math.nan
    last_loss: float = math.nan
    best_loss: float = math.nan
    validation_loss: float = math.nan
    sample_distance: float = math.nan
    skipped_steps: int = 0

    def record(self, loss: float, skipped_steps: int) -> None:
        """Takes in one step's loss."""
        if math.isnan(self.first_loss):
            self.first_loss = loss
        self.last_loss = loss
        self.best_loss = loss if math.isnan(self.best_loss) else min(self.best_loss, loss)
        self.skipped_steps = skipped_steps


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended.

    Attributes:
      progress: the whole run's, earlier starts included.
      step_seconds: wall time of each step of this start after the first, which compiles; without the time that the loop
        spends on validation and on saving.
      first_step_at: `time.time()` when the first step of this start had been computed; NaN if there was none.
      stop_signal: the signal that ended training early, or None.
      state: the final state.
    """

    progress: Progress
    step_seconds: list[float]
    first_step_at: float
    stop_signal: int | None
    state: Mapping[str, Any]

    @property
    def median_step_seconds(self) -> float:
        """NaN where fewer than two steps were made."""
        return statistics.median(self.step_seconds) if self.step_seconds else math.nan


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A batch on its way to the devices, with the data position after it."""

    executable: Executable
    batch: Mapping[str, Any]
    learning_rate: float
    position: bytes
    wait_seconds: float


@dataclasses.dataclass(frozen=True)
class _Dispatched:
    """A step whose metrics have not been read yet."""

    step: int
    metrics: Mapping[str, Any]
    prepared: _Prepared
    done_at: float | None  # time.perf_counter() where the call returned only when the step was computed


class Sampler(Protocol):
    """Draws images with a run's weights; every process calls it.

    Attributes:
      distance: of the images drawn last from those trained on, over that of held-out images; NaN where not known.
    """

    distance: float

    def prepare(self) -> None:
        """Compiles what `sample` needs."""

    def sample(self, state: Mapping[str, Any]) -> np.ndarray:
        """Images on one sheet, uint8 [height, width, 3]."""


def train(run: Run, data: RunData, checkpointer: Checkpointer, logger: MetricsLogger | None, profiler: Profiler,
          restored: tuple[int, Any, dict[str, Any]] | None, sampler: Sampler | None = None) -> Outcome:  # fmt: skip
    """Trains until `training.steps` steps are done or SIGTERM or SIGINT asks to stop; saves before it returns.

    The host runs one step ahead of the devices: while a step is computed its successor's batch is fetched and placed,
    and then the metrics of the step before are read.

    Args:
      logger: None on processes that do not report.
      restored: what `checkpointer.restore` gave.
      sampler: draws the images of a run that samples.
    """
    return _Loop(run, data, checkpointer, logger, profiler, sampler).train(restored)


class _Loop:
    def __init__(
        self,
        run: Run,
        data: RunData,
        checkpointer: Checkpointer,
        logger: Any,
        profiler: Profiler,
        sampler: Sampler | None,
    ):
        self._run, self._data, self._sampler = run, data, sampler
        self._checkpointer, self._logger, self._profiler = checkpointer, logger, profiler
        self._progress = Progress()
        self._pending: _Dispatched | None = None
        self._step_seconds: list[float] = []
        self._last_read_at = math.nan
        self._first_step_at = math.nan
        self._position = data.train.get_state()

    def train(self, restored: tuple[int, Any, dict[str, Any]] | None) -> Outcome:
        run, num_steps = self._run, self._run.config.training.steps
        if restored is None:
            state = run.initial_state()
        else:
            state = run.runtime.from_arrays(restored[1])
            self._resume(restored[2])
        start, stop_signal = self._progress.steps, 0
        if not run.runtime.captures_late:
            if self._data.validation is not None:
                run.eval_step.executable_for(self._microbatches(next(iter(self._data.validation))))
            if self._sampler is not None:
                self._sampler.prepare()
        with stop_requests() as stop:
            prepared = self._prepare(start) if start < num_steps else None
            for step in range(start, num_steps):
                self._profiler.step(step, self._pending.metrics if self._pending else None)
                state, metrics = prepared.executable(state, prepared.batch)
                dispatched, self._position = (
                    _Dispatched(step, metrics, prepared, run.runtime.done_at()),
                    prepared.position,
                )
                if step + 1 < num_steps:
                    prepared = self._prepare(step + 1)
                self._read_pending()
                self._pending, self._progress.steps = dispatched, step + 1
                if self._checkpointer.due(step + 1):
                    self._save(state)
                interval = run.config.training.validation_interval
                if interval and (step + 1) % interval == 0:
                    self._validate(state)
                if self._sampler is not None and (step + 1) % run.config.sampling.interval == 0:
                    self._sample(state)
                stop_signal = run.runtime.agree_by_next(stop.signal or 0)
                if stop_signal:
                    if stop.signal is None:
                        name = signal.Signals(stop_signal).name
                        _log.warning("%s to another process: stopping; a checkpoint is saved first", name)
                    break
            self._read_pending()
            if self._progress.steps > start:
                self._save(state, force=True)
            self._checkpointer.wait()
        if self._progress.steps >= num_steps:
            stop_signal = 0  # it came too late to end anything early
        return Outcome(self._progress, self._step_seconds, self._first_step_at, stop_signal or None, state)

    def _resume(self, host: dict[str, Any]) -> None:
        self._progress = Progress(**host["progress"])
        self._position = base64.b64decode(host["data_position"])
        self._data.train.set_state(self._position)

    def _prepare(self, step: int) -> _Prepared:
        config = self._run.config
        start = time.perf_counter()
        rows = next(self._data.train)
        wait_seconds = time.perf_counter() - start
        rate = learning_rate(step, config.lr_schedule, config.optimizer, config.training.steps)
        batch = {**self._microbatches(rows), LEARNING_RATE: np.float32(rate)}
        executable = self._run.train_step.executable_for(batch)
        return _Prepared(executable, executable.place(batch), rate, self._data.train.get_state(), wait_seconds)

    def _microbatches(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """[rows, ...] to [microbatch, rows, ...], tokens in the order of the mesh."""
        num = self._run.config.training.microbatches
        batch = {name: array.reshape(num, -1, *array.shape[1:]) for name, array in rows.items()}
        tensors = self._run.config.model.batch_tensors(self._run.config.training.sequence_length)
        return in_mesh_order(batch, self._run.mesh, tensors)

    def _read_pending(self) -> None:
        """Waits for the metrics of the step before the one just dispatched, and reports them."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        metrics = self._run.runtime.read(pending.metrics)
        now = pending.done_at or time.perf_counter()
        step_seconds = now - self._last_read_at
        if math.isnan(step_seconds):
            self._first_step_at = time.time()
        else:
            self._step_seconds.append(step_seconds)
        self._last_read_at = now
        skipped = int(metrics.pop(SKIPPED_STEPS))
        if skipped > self._progress.skipped_steps:
            _log.warning(
                "step %d: the gradient norm is %s: update skipped, %d so far",
                pending.step + 1,
                metrics["grad_norm"],
                skipped,
            )
        self._progress.record(metrics["loss"], skipped)
        if len(self._step_seconds) == _STEPS_BEFORE_ESTIMATE:
            self._say_how_long(pending.step + 1)
        if self._logger is None or not self._logger.due(pending.step + 1):
            return
        values = {name: value for name, value in metrics.items() if name != "num_tokens"}
        values["lr"] = pending.prepared.learning_rate
        if not math.isnan(step_seconds):
            training = self._run.config.training
            values["num_tokens"] = training.batch_size * training.sequence_length
            values["step_seconds"] = step_seconds
        values["data_wait_seconds"] = pending.prepared.wait_seconds
        if skipped:
            values[SKIPPED_STEPS] = skipped
        self._logger.log(pending.step + 1, values)

    def _say_how_long(self, steps_done: int) -> None:
        """An estimate of the rest of the run, once a few steps after the one that compiles have been timed."""
        remaining = self._run.config.training.steps - steps_done
        if self._logger is None or remaining <= 0:
            return
        # The mean: on CPUs a step that is read early for a validation seems quick, and the next one slow.
        seconds = statistics.fmean(self._step_seconds)
        line = f"{remaining} steps to go, at {seconds:.3g} s each: about {duration(remaining * seconds)}"
        config = self._run.config
        if config.training.validation_interval or (config.sampling and config.sampling.interval):
            line += ", and what validation and sampling take"
        print(line, flush=True)

    def _validate(self, state: Mapping[str, Any]) -> None:
        self._read_pending()
        weights = {name: tensor for name, tensor in state.items() if name.startswith(PARAMS) or name == EXPERT_BIAS}
        results = []
        for _, rows in zip(
            range(self._run.config.training.validation_batches), iter(self._data.validation), strict=False
        ):
            batch = self._microbatches(rows)
            executable = self._run.eval_step.executable_for(batch)
            results.append(executable(weights, executable.place(batch))[1])
        totals = [self._run.runtime.read(result) for result in results]
        num_tokens = sum(total["num_tokens"] for total in totals)
        self._progress.validation_loss = sum(total["loss_sum"] for total in totals) / num_tokens
        if self._logger is not None:
            self._logger.log(self._progress.steps, {"validation_loss": self._progress.validation_loss})
        self._last_read_at = time.perf_counter()

    def _sample(self, state: Mapping[str, Any]) -> None:
        self._read_pending()
        images = self._sampler.sample(state)
        self._progress.sample_distance = self._sampler.distance
        if self._logger is not None:
            self._logger.log_image(self._progress.steps, "samples", images)
            if not math.isnan(self._sampler.distance):
                self._logger.log(self._progress.steps, {"sample_distance": self._sampler.distance})
        self._last_read_at = time.perf_counter()

    def _save(self, state: Mapping[str, Any], *, force: bool = False) -> None:
        self._read_pending()
        host = {
            "progress": dataclasses.asdict(self._progress),
            "data_position": base64.b64encode(self._position).decode(),
        }
        if self._logger is not None:
            self._logger.flush()  # else a kill after this checkpoint would leave a gap in the curves
        arrays = self._run.runtime.to_arrays(state)
        if self._run.runtime.saves:
            self._checkpointer.save(self._progress.steps, arrays, host, force=force)
        self._last_read_at = time.perf_counter()


def restore(run: Run, checkpointer: Checkpointer) -> tuple[int, Any, dict[str, Any]] | None:
    """The newest intact checkpoint on this run's mesh, or None where there is none or resuming is off.

    Raises:
      CheckpointError: there are checkpoints and none is intact.
      ConfigError: the checkpoint is of another model.
    """
    if not run.config.checkpoint.resume:
        return None
    try:
        return checkpointer.restore(run.runtime.abstract_state())
    except CheckpointMismatchError as error:
        raise ConfigError("checkpoint.folder", error.problem, error.cure) from error
