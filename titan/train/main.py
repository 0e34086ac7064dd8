"""The main program of every recipe: flags to configuration, configuration to a trained run."""

import logging
import pathlib
import sys
from collections.abc import Sequence

from titan.core.config import serialize
from titan.core.config.flags import one_line_errors, parse
from titan.train.config import Config


def main(recipe: Config, argv: Sequence[str] | None = None) -> int:
    """Trains the recipe as changed by the command line.

    Returns:
      The exit code: 0 when all steps are done, 128 + n when signal n stopped the run after a checkpoint, 1 when a
      checkpoint could not be read or written. Bad input ends the process with code 2.
    """
    with one_line_errors():
        config = parse(sys.argv if argv is None else argv, recipe)
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        logging.getLogger("jax").setLevel(logging.WARNING)
        # Nothing that loads torch or jax is imported before the flags are known to be good.
        from titan.core.checkpoint import CheckpointError

        try:
            return _train(config)
        except CheckpointError as error:
            print(error, file=sys.stderr)
            return 1


def run_folder(config: Config) -> pathlib.Path:
    """Where a run keeps its checkpoints, metrics, configuration and summary."""
    return pathlib.Path(config.checkpoint.folder or f"~/.cache/titan/runs/{config.name}").expanduser()


def _train(config: Config) -> int:
    from titan.core.checkpoint import Checkpointer
    from titan.core.metrics import MetricsLogger, resolve_peak
    from titan.core.profiler import Profiler
    from titan.train.build import build
    from titan.train.data import open_data
    from titan.train.loop import restore, train
    from titan.train.runtime_xla import XlaRuntime
    from titan.train.summary import summarize, write_summary

    folder = run_folder(config)
    runtime = XlaRuntime(config)
    run = build(config, runtime)
    data = open_data(run.config, process_index=runtime.process_index, process_count=runtime.process_count)
    serialize.save(run.config, str(folder))
    print(f"{run.config.name}: {run.mesh} on {runtime.device_kind}; files in {folder}", flush=True)
    peak = resolve_peak(run.config.metrics)
    flops_per_token = run.config.model.flops_per_token(run.config.training.sequence_length)
    speed = {"num_chips": peak.num_chips, "flops_per_token": flops_per_token, "peak_flops_per_chip": peak.flops_per_chip}
    checkpoints = folder / "checkpoints"
    with Checkpointer(run.config.checkpoint, str(checkpoints)) as checkpointer:
        restored = restore(run, checkpointer)
        resumed_step = restored[0] if restored else None
        if restored:
            print(f"resumed from {checkpoints}/{resumed_step}", flush=True)
        with (
            MetricsLogger(run.config.metrics, str(folder), resumed_step=resumed_step, **speed) as logger,
            Profiler(run.config.profiler, str(folder)) as profiler,
        ):
            outcome = train(run, data, checkpointer, logger, profiler, restored)
    summary = summarize(run, outcome, **speed)
    summary |= {
        "folder": str(folder),
        "checkpoint": f"{checkpoints}/{outcome.progress.steps}",
        "config": str(folder / "config.json"),
        "metrics": str(folder / "tensorboard") if run.config.metrics.tensorboard else None,
    }
    path = write_summary(summary, folder)
    for name in ("checkpoint", "metrics", "config"):
        print(f"{name}: {summary[name]}")
    print(f"summary: {path}")
    return 0 if outcome.stop_signal is None else 128 + outcome.stop_signal
