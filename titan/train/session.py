"""A run from its configuration to its summary: everything around the training loop, opened, used and closed."""

import contextlib
import dataclasses
import logging
import pathlib
from typing import Any

from titan.core.checkpoint import Checkpointer
from titan.core.config import serialize
from titan.core.config.validate import ConfigError
from titan.core.metrics import MetricsLogger
from titan.core.profiler import Profiler
from titan.core.progress import progress, quiet
from titan.train.build import build
from titan.train.config.processes import DistributedConfig
from titan.train.config.run import Config
from titan.train.inputs.data import RunData, open_data
from titan.train.inputs.hf_weights import write_hf
from titan.train.loop.folder_lock import folder_lock, holder
from titan.train.loop.loop import Outcome, Sampler, restore, train
from titan.train.loop.summary import Speed, summarize, write_summary
from titan.train.runtime.interface import Runtime
from titan.train.runtime.processes import check_same, on_all_processes
from titan.train.runtime.run import Run
from titan.train.sharding.mesh_axes import data_share


@dataclasses.dataclass(frozen=True)
class Session:
    """What one start of a run works with.

    Attributes:
      folder: of checkpoints, metrics, configuration and summary.
      run: built, its steps compiled when the first batch comes.
      data: what is read, at the position of the checkpoint if there is one.
      checkpointer: saves the state.
      restored: the newest intact checkpoint, None for a new run.
      speed: what a step's time is measured against.
      logger: None on processes that leave reports to the first.
      profiler: traces steps.
      sampler: draws images; None for a run that does not sample.
    """

    folder: pathlib.Path
    run: Run
    data: RunData
    checkpointer: Checkpointer
    restored: tuple[int, Any, dict[str, Any]] | None
    speed: Speed
    logger: MetricsLogger | None
    profiler: Profiler
    sampler: Sampler | None

    @property
    def checkpoints(self) -> pathlib.Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoints"

    def train(self) -> Outcome:
        """Trains to the last step, or until a signal stops the run."""
        return train(self.run, self.data, self.checkpointer, self.logger, self.profiler, self.restored, self.sampler)

    def say(self, line: str) -> None:
        """Prints a line, once for all processes."""
        _say(self.run.runtime, line)


def run_folder(config: Config) -> pathlib.Path:
    """Where a run keeps its checkpoints, metrics, configuration and summary."""
    return pathlib.Path(config.checkpoint.folder or f"~/.cache/titan/runs/{config.name}").expanduser()


def open_session(config: Config, stack: contextlib.ExitStack) -> Session:
    """Opens devices, data and folder of a run, and restores its newest checkpoint; nothing is compiled yet.

    Args:
      config: a validated configuration.
      stack: closes what is opened here.

    Raises:
      ConfigError: the configuration does not suit devices, data or folder, or differs between processes.
      CheckpointError: there are checkpoints and none is intact.
    """
    folder = run_folder(config)
    runtime = _open_runtime(config)
    reports = runtime.process_index == 0
    if not reports:
        logging.disable(logging.WARNING)
    stack.enter_context(quiet(not reports))
    # How the processes of this start find one another is no part of the run.
    config = dataclasses.replace(config, distributed=DistributedConfig())
    same_flags = ConfigError("", "the processes of this run were given different flags", "give all of them the same")
    check_same(runtime, serialize.to_json(config).encode(), same_flags)
    with on_all_processes(runtime):
        run = build(config, runtime)
        share, num_shares = data_share(run.mesh, runtime.device_processes, runtime.process_index)
        data = open_data(run.config, process_index=share, process_count=num_shares)
        _say(runtime, f"{run.config.name}: {run.mesh} on {runtime.device_kind}; files in {folder}")
        if reports:
            stack.enter_context(folder_lock(folder))
    _check_same_inputs(runtime, data, folder)
    checkpointer = stack.enter_context(Checkpointer(run.config.checkpoint, str(folder / "checkpoints")))
    with progress("restoring the newest checkpoint"):
        restored = restore(run, checkpointer)
    resumed_step = restored[0] if restored else 0
    if restored:
        _say(runtime, f"resumed from {folder}/checkpoints/{resumed_step}")
        if resumed_step >= run.config.training.steps:
            steps = run.config.training.steps
            _say(runtime, f"all of --training.steps={steps} are done; give more to train on")
    if reports:
        # Not before the checkpoint has been found to fit: it would replace the configuration that does.
        serialize.save(run.config, str(folder))
    speed = Speed.of(run)
    logger = None
    if reports:
        logger = MetricsLogger(run.config.metrics, str(folder), resumed_step=resumed_step, **dataclasses.asdict(speed))
        stack.enter_context(logger)
    profiler = stack.enter_context(Profiler(run.config.profiler, str(folder), traces=reports))
    return Session(folder, run, data, checkpointer, restored, speed, logger, profiler, _sampler(run, data))


def finish(session: Session, outcome: Outcome) -> None:
    """Writes the weights that were asked for, and the summary; every process must call it."""
    run = session.run
    if run.config.checkpoint.save_hf:
        with progress("gathering the weights"):
            weights = run.runtime.host_parameters(outcome.state)
        if session.logger is not None:
            with progress("writing the weights"):
                session.say(f"weights: {write_hf(run.config, weights)}")
    run.runtime.close()
    if session.logger is None:
        return
    summary = summarize(run, outcome, session.speed)
    summary |= {
        "folder": str(session.folder),
        "checkpoint": f"{session.checkpoints}/{outcome.progress.steps}",
        "config": str(session.folder / "config.json"),
        "metrics": str(session.folder / "tensorboard") if run.config.metrics.tensorboard else None,
    }
    path = write_summary(summary, session.folder)
    for name in ("checkpoint", "metrics", "config"):
        session.say(f"{name}: {summary[name]}")
    session.say(f"summary: {path}")


def _open_runtime(config: Config) -> Runtime:
    if config.tpu_config.is_xla:
        from titan.train.runtime.xla import XlaRuntime

        return XlaRuntime(config)
    from titan.train.runtime.torch import TorchRuntime

    return TorchRuntime(config)


def _check_same_inputs(runtime: Runtime, data: RunData, folder: pathlib.Path) -> None:
    problem = "the processes of this run read different data, or tokenizers"
    check_same(runtime, data.train.get_state(), ConfigError("data.path", problem, "give all of them the same"))
    problem = f"{folder} is not the same folder for all processes of this run"
    cure = "give one on a file system that their hosts share"
    check_same(runtime, holder(folder).encode(), ConfigError("checkpoint.folder", problem, cure))


def _sampler(run: Run, data: RunData) -> Sampler | None:
    if run.predict_step is None:
        return None
    from titan.train.images.sampler import Sampler as ImageSampler

    return ImageSampler(run, data.images)


def _say(runtime: Runtime, line: str) -> None:
    if runtime.process_index == 0:
        print(line, flush=True)
