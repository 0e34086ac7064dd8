"""`summary.json`: what a run came to, for scripts and benchmarks."""

import dataclasses
import json
import math
import pathlib
from typing import Any

from titan.core.files import write_atomically
from titan.core.metrics import step_metrics
from titan.train.loop.loop import Outcome
from titan.train.runtime.run import Run

FILE_NAME = "summary.json"


@dataclasses.dataclass(frozen=True)
class Speed:
    """What the time of a step is measured against.

    Attributes:
      num_chips: chips of the whole run.
      flops_per_token: FLOPs that the model needs per token, see `titan.core.metrics.step_metrics`.
      peak_flops_per_chip: FLOP/s.
    """

    num_chips: int
    flops_per_token: float
    peak_flops_per_chip: float

    @classmethod
    def of(cls, run: Run) -> "Speed":
        """That of a run on its devices; on a device that no table lists it takes half a second to measure."""
        peak = run.runtime.peak(run.config.metrics)
        flops_per_token = run.config.model.flops_per_token(run.config.training.sequence_length)
        return cls(peak.num_chips, flops_per_token, peak.flops_per_chip)


def summarize(run: Run, outcome: Outcome, speed: Speed) -> dict[str, Any]:
    """The summary of a run: losses over all its starts, speeds of this start.

    `tokens_per_second` and `mfu` are those of the median step, without the first, which compiles. `*_seconds` is the
    time that the start-up's stages took, `first_step_at` when (`time.time()`) the first step had been computed. A
    number that does not exist (no step was made) is None.
    """
    progress, training = outcome.progress, run.config.training
    numbers = {
        "first_loss": progress.first_loss,
        "last_loss": progress.last_loss,
        "best_loss": progress.best_loss,
        "validation_loss": progress.validation_loss,
        "sample_distance": progress.sample_distance,
        "tokens_per_second": math.nan,
        "mfu": math.nan,
        "median_step_seconds": outcome.median_step_seconds,
        "first_step_at": outcome.first_step_at,
        **{f"{stage}_seconds": seconds for stage, seconds in run.seconds.items()},
    }
    if outcome.step_seconds:
        speeds = step_metrics(
            num_tokens=training.batch_size * training.sequence_length,
            step_seconds=outcome.median_step_seconds,
            **dataclasses.asdict(speed),
        )
        numbers |= {name: speeds[name] for name in ("tokens_per_second", "mfu")}
    steps = (run.train_step, run.eval_step, run.predict_step)
    return {
        "name": run.config.name,
        "steps": progress.steps,
        "skipped_steps": progress.skipped_steps,
        "recompiles": sum(step.recompiles for step in steps if step is not None),
        "stop_signal": outcome.stop_signal,
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
    }


def write_summary(summary: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """Writes `summary.json` into the run's folder, whole or not at all."""
    path = folder / FILE_NAME
    write_atomically(path, (json.dumps(summary, indent=2) + "\n").encode())
    return path
