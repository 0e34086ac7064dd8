"""The main program of every recipe: flags to configuration, configuration to a trained run."""

import contextlib
import functools
import logging
import os
import pathlib
import sys
from collections.abc import Sequence

from titan.core.config import serialize
from titan.core.config.flags import one_line_errors, parse
from titan.core.config.validate import ConfigError, LocalConfigError
from titan.train.config import Config
from titan.train.variant import Variants


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
        if not _is_xla(config) and config.parallelism.num_devices > 1 and "WORLD_SIZE" not in os.environ:
            from titan.train.launch import launch

            return launch(config.parallelism.num_devices, _worker, config)
        return _run(config)


def run_folder(config: Config) -> pathlib.Path:
    """Where a run keeps its checkpoints, metrics, configuration and summary."""
    return pathlib.Path(config.checkpoint.folder or f"~/.cache/titan/runs/{config.name}").expanduser()


def _is_xla(config: Config) -> bool:
    return config.tpu_config.use_graph_trainer and config.tpu_config.executor == "xla"


def _worker(config: Config) -> int:
    with one_line_errors():
        return _run(config)


def _run(config: Config) -> int:
    """The run of one process. Of several, the first says what all of them would, and each what it alone knows."""
    from titan.core.checkpoint import CheckpointError

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)  # at INFO it reports each kind of device that is not there
    is_first = os.environ.get("RANK", "0") == "0"
    if not is_first:
        logging.disable(logging.WARNING)
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


def _train(config: Config) -> int:
    if config.aot.enable:
        from titan.train import aot

        return aot.main(config)
    from titan.core.checkpoint import Checkpointer
    from titan.core.metrics import MetricsLogger
    from titan.core.profiler import Profiler
    from titan.train.build import build
    from titan.train.data import open_data
    from titan.train.folder_lock import folder_lock
    from titan.train.hf_weights import write_hf
    from titan.train.loop import restore, train
    from titan.train.mesh_axes import data_share
    from titan.train.summary import summarize, write_summary

    if _is_xla(config):
        from titan.train.runtime_xla import XlaRuntime as Runtime
    else:
        from titan.train.runtime_torch import TorchRuntime as Runtime

    folder = run_folder(config)
    runtime = Runtime(config)
    run = build(config, runtime)
    share, num_shares = data_share(run.mesh, runtime.device_processes, runtime.process_index)
    data = open_data(run.config, process_index=share, process_count=num_shares)
    reports = runtime.process_index == 0
    say = functools.partial(print, flush=True) if reports else lambda _: None
    say(f"{run.config.name}: {run.mesh} on {runtime.device_kind}; files in {folder}")
    checkpoints = folder / "checkpoints"
    with contextlib.ExitStack() as stack:
        if reports:
            stack.enter_context(folder_lock(folder))
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
        profiler = stack.enter_context(Profiler(run.config.profiler, str(folder)))
        sampler = None
        if run.predict_step is not None:
            from titan.train.pictures.sampler import Sampler

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
