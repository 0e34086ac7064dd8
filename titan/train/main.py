"""The main program of every recipe: flags to configuration, configuration to a trained run."""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from titan.core.config.flags import one_line_errors, parse
from titan.core.config.sections import with_sections
from titan.core.config.validate import ConfigError, LocalConfigError
from titan.core.plugins import load_plugins, plugins_of
from titan.train.config.fit_defaults import fit_defaults
from titan.train.config.run import Config
from titan.train.config.variant import Variants
from titan.train.runtime.environment import prepare_torch, restart_with_tunables


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
    if argv is None:
        restart_with_tunables()
    with one_line_errors():
        argv = sys.argv if argv is None else argv
        plugins = load_plugins(plugins_of(argv))
        if plugins:
            print(f"plugins: {', '.join(plugins)}", file=sys.stderr)
        recipe = with_sections(recipe)
        bases = {hardware: variant.of(recipe) for hardware, variant in (variants or {}).items()}
        config = parse(argv, recipe, variants=bases, variant_flag="hardware", fit=fit_defaults)
        # Nothing that loads torch or jax is imported before the flags are known to be good.
        prepare_torch()
        num_processes = _num_processes_to_start(config)
        if num_processes:
            from titan.train.runtime.launch import launch

            return launch(num_processes, _worker, config)
        return _run(config)


def _num_processes_to_start(config: Config) -> int:
    """0 where this process is the run, or one that another program has started for it."""
    if config.tpu_config.is_xla:
        return config.distributed.local_processes
    return (
        config.parallelism.num_devices if config.parallelism.num_devices > 1 and "WORLD_SIZE" not in os.environ else 0
    )


def _worker(config: Config) -> int:
    with one_line_errors():
        load_plugins(config.plugins)
        return _run(config)


def _run(config: Config) -> int:
    """The run of one process. Of several, the first says what all of them would, and each what it alone knows."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("jax").setLevel(logging.WARNING)  # at INFO it reports each kind of device that is not there
    if config.aot.enable:
        from titan.train.aot.command import main as compile_ahead_of_time

        return compile_ahead_of_time(config)
    if config.tpu_config.is_xla and config.distributed.is_asked_for:
        return _run_jointly(config)
    from titan.core.checkpoint import CheckpointError

    is_first = config.tpu_config.is_xla or os.environ.get("RANK", "0") == "0"
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
    from titan.train.session import finish, open_session

    with contextlib.ExitStack() as stack:
        session = open_session(config, stack)
        outcome = session.train()
    finish(session, outcome)
    return 0 if outcome.stop_signal is None else 128 + outcome.stop_signal
