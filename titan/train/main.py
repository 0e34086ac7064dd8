"""The main program of every recipe: flags to configuration, configuration to a trained run."""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence

from titan.core.config import serialize
from titan.core.config.flags import one_line_errors, parse
from titan.core.config.validate import ConfigError, LocalConfigError
from titan.train.config.run import Config
from titan.train.config.variant import Variants


def main(recipe: Config, argv: Sequence[str] | None = None, *, variants: Variants | None = None) -> int:
    """Trains the recipe as changed by the command line.

    Args:
      recipe: the defaults of the flags.
      argv: the command line; None: that of the process.
      variants: the recipe on given hardware, for `--variant`; with --aot and --hardware that of the hardware is taken.

    Returns:
      The exit code: 0 when all steps are done, 128 + n when signal n stopped the run after a checkpoint, 1 when a
      checkpoint could not be read or written. Bad input ends the process with code 2.
    """
    with one_line_errors():
        bases = {hardware: variant.of(recipe) for hardware, variant in (variants or {}).items()}
        config = parse(sys.argv if argv is None else argv, recipe, variants=bases, variant_flag="hardware")
        # Nothing that loads torch or jax is imported before the flags are known to be good. Where TorchTPU is
        # installed, importing torch would load it too, which changes what is captured.
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        num_processes = _num_processes_to_start(config)
        if num_processes:
            from titan.train.runtime.launch import launch

            return launch(num_processes, _worker, config)
        return _run(config)


def run_folder(config: Config) -> pathlib.Path:
    """Where a run keeps its checkpoints, metrics, configuration and summary."""
    return pathlib.Path(config.checkpoint.folder or f"~/.cache/titan/runs/{config.name}").expanduser()


def _is_xla(config: Config) -> bool:
    return config.tpu_config.use_graph_trainer and config.tpu_config.executor == "xla"


def _num_processes_to_start(config: Config) -> int:
    """0 where this process is the run, or one that another program has started for it."""
    if _is_xla(config):
        return config.distributed.local_processes
    return (
        config.parallelism.num_devices if config.parallelism.num_devices > 1 and "WORLD_SIZE" not in os.environ else 0
    )


def _worker(config: Config) -> int:
    with one_line_errors():
        return _run(config)


def _run(config: Config) -> int:
    """The run of one process. Of several, the first says what all of them would, and each what it alone knows."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)  # at INFO it reports each kind of device that is not there
    if config.aot.enable:
        from titan.train.aot.command import command as aot

        return aot.main(config)
    if _is_xla(config) and config.distributed.is_asked_for:
        return _run_jointly(config)
    from titan.core.checkpoint import CheckpointError

    is_first = _is_xla(config) or os.environ.get("RANK", "0") == "0"
    try:
        return _train(config)
    except CheckpointError as error:
        if is_first:
            print(error, file=sys.stderr)
        return 1
    except ConfigError as error:
        if is_first or isinstance(error, LocalConfigError):
            raise
        return 2


def _run_jointly(config: Config) -> int:
    """The run as one of several processes of the xla executor. A failure of one of them ends all."""
    from titan.core.checkpoint import CheckpointError
    from titan.train.runtime.processes import FailedElsewhere, is_lost_peer, join, leave

    join(config.distributed)
    try:
        return _train(config)
    except Exception as error:
        # Each process says what it met, since others may not have met it.
        if is_lost_peer(error):
            reason = " ".join(str(error).split())
            print(f"another process of this run has ended or cannot be reached ({reason})", file=sys.stderr)
        elif isinstance(error, (ConfigError, CheckpointError)):
            print(error, file=sys.stderr)
        elif not isinstance(error, FailedElsewhere):
            traceback.print_exc()
        leave(error, 2 if isinstance(error, (ConfigError, FailedElsewhere)) else 1)


def _train(config: Config) -> int:
    from titan.core.checkpoint import Checkpointer
    from titan.core.metrics import MetricsLogger
    from titan.core.profiler import Profiler
    from titan.train.build import build
    from titan.train.config.processes import DistributedConfig
    from titan.train.inputs.data import open_data
    from titan.train.inputs.hf_weights import write_hf
    from titan.train.loop.folder_lock import folder_lock, holder
    from titan.train.loop.loop import restore, train
    from titan.train.loop.summary import summarize, write_summary
    from titan.train.runtime.processes import check_same, on_all_processes
    from titan.train.sharding.mesh_axes import data_share

    if _is_xla(config):
        from titan.train.runtime.xla import XlaRuntime as Runtime
    else:
        from titan.train.runtime.torch import TorchRuntime as Runtime

    folder = run_folder(config)
    runtime = Runtime(config)
    reports = runtime.process_index == 0
    if not reports:
        logging.disable(logging.WARNING)
    say = functools.partial(print, flush=True) if reports else lambda _: None
    # How the processes of this start find one another is no part of the run.
    config = dataclasses.replace(config, distributed=DistributedConfig())
    same_flags = ConfigError("", "the processes of this run were given different flags", "give all of them the same")
    check_same(runtime, serialize.to_json(config).encode(), same_flags)
    checkpoints = folder / "checkpoints"
    with contextlib.ExitStack() as stack:
        with on_all_processes(runtime):
            run = build(config, runtime)
            share, num_shares = data_share(run.mesh, runtime.device_processes, runtime.process_index)
            data = open_data(run.config, process_index=share, process_count=num_shares)
            say(f"{run.config.name}: {run.mesh} on {runtime.device_kind}; files in {folder}")
            if reports:
                stack.enter_context(folder_lock(folder))
        problem = "the processes of this run read different data, or tokenizers"
        check_same(runtime, data.train.get_state(), ConfigError("data.path", problem, "give all of them the same"))
        problem = f"{folder} is not the same folder for all processes of this run"
        cure = "give one on a file system that their hosts share"
        check_same(runtime, holder(folder).encode(), ConfigError("checkpoint.folder", problem, cure))
        checkpointer = stack.enter_context(Checkpointer(run.config.checkpoint, str(checkpoints)))
        restored = restore(run, checkpointer)
        resumed_step = restored[0] if restored else 0
        if restored:
            say(f"resumed from {checkpoints}/{resumed_step}")
            if resumed_step >= run.config.training.steps:
                say(f"all of --training.steps={run.config.training.steps} are done; give more to train on")
        if reports:
            # Not before the checkpoint has been found to fit: it would replace the configuration that does.
            serialize.save(run.config, str(folder))
        peak = runtime.peak(run.config.metrics)
        flops_per_token = run.config.model.flops_per_token(run.config.training.sequence_length)
        speed = {
            "num_chips": peak.num_chips,
            "flops_per_token": flops_per_token,
            "peak_flops_per_chip": peak.flops_per_chip,
        }
        logger = None
        if reports:
            logger = MetricsLogger(run.config.metrics, str(folder), resumed_step=resumed_step, **speed)
            stack.enter_context(logger)
        profiler = stack.enter_context(Profiler(run.config.profiler, str(folder), traces=reports))
        sampler = None
        if run.predict_step is not None:
            from titan.train.images.sampler import Sampler

            sampler = Sampler(run, data.pictures)
        outcome = train(run, data, checkpointer, logger, profiler, restored, sampler)
    if run.config.checkpoint.save_hf:
        weights = runtime.host_parameters(outcome.state)
        if reports:
            say(f"weights: {write_hf(run.config, weights)}")
    runtime.close()
    if reports:
        summary = summarize(run, outcome, **speed)
        summary |= {
            "folder": str(folder),
            "checkpoint": f"{checkpoints}/{outcome.progress.steps}",
            "config": str(folder / "config.json"),
            "metrics": str(folder / "tensorboard") if run.config.metrics.tensorboard else None,
        }
        path = write_summary(summary, folder)
        for name in ("checkpoint", "metrics", "config"):
            say(f"{name}: {summary[name]}")
        say(f"summary: {path}")
    return 0 if outcome.stop_signal is None else 128 + outcome.stop_signal
