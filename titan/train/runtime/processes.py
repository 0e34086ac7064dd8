"""This process among those of a run of the xla executor: how it joins them, and how it leaves them when it fails."""

import contextlib
import os
import socket
import sys
import threading
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from titan.core.config.validate import ConfigError
from titan.train.config.processes import DistributedConfig

if TYPE_CHECKING:
    from titan.train.runtime.interface import Runtime

# How long a process that has come to its end waits for the others. Those that have not come by then are ended by JAX.
_SHUTDOWN_SECONDS = 30.0


def join(config: DistributedConfig) -> None:
    """Makes this process one of several (`jax.distributed.initialize`), if it is asked for.

    Must come before anything that asks JAX for its devices. The process ends, with one line and code 2, if the others
    do not come in time.

    Raises:
      ConfigError: the coordinator cannot be started or found.
    """
    if not config.is_asked_for:
        return
    import jax

    # It would take SIGTERM away from the loop, which obeys it by itself.
    jax.config.update("jax_enable_preemption_service", False)
    if config.local_processes:
        jax.config.update("jax_platforms", "cpu")  # an accelerator cannot be shared
    address, num_processes, process_id = _place(config)
    if address and process_id == 0:
        _check_port(address, num_processes)
    # JAX ends the process too, with a stack trace in place of a cure.
    patience = threading.Timer(config.initialization_timeout_seconds, _give_up, (config, address, num_processes))
    patience.daemon = True
    patience.start()
    try:
        jax.distributed.initialize(
            address,
            num_processes,
            process_id,
            cluster_detection_method="deactivate" if address else None,
            initialization_timeout=config.initialization_timeout_seconds + 60,
            heartbeat_timeout_seconds=config.heartbeat_timeout_seconds,
            shutdown_timeout_seconds=int(_SHUTDOWN_SECONDS),
        )
    except Exception as error:  # the detection of clusters raises whatever it comes upon
        reason = " ".join(str(error).split())[:300]
        if address:
            raise _no_coordinator(address, num_processes, process_id, reason) from error
        raise ConfigError(
            "distributed.enable",
            f"JAX finds no cluster that this process belongs to ({reason})",
            "leave it out for a run of one process, or give --distributed.coordinator_address, num_processes and "
            "process_id",
        ) from error
    finally:
        patience.cancel()


def leave(error: Exception, code: int) -> NoReturn:
    """Ends this process after a failure, and with it the run.

    Processes that fail alike end together and at once. Others, which would wait for this one in their next collective,
    are ended by JAX a while after.
    """
    import jax

    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if not is_lost_peer(error):
        # Just before JAX would end this process too, with a message that would hide its own.
        patience = threading.Timer(_SHUTDOWN_SECONDS - 1, os._exit, (code,))
        patience.daemon = True
        patience.start()
        with contextlib.suppress(Exception):  # the coordinator is gone
            jax.distributed.shutdown()
    os._exit(code)  # threads that wait for other processes would hold up an orderly end


def is_lost_peer(error: Exception) -> bool:
    """Whether a collective failed since another process has ended; on TPUs it is JAX that ends this one then."""
    import jax

    return isinstance(error, jax.errors.JaxRuntimeError) and "Gloo" in str(error)


class FailedElsewhere(Exception):  # noqa: N818 (it is no error of this process)
    """Another process has failed, and says why."""


@contextlib.contextmanager
def on_all_processes(runtime: "Runtime") -> Iterator[None]:
    """A ConfigError in the `with` block, on one process or some, ends the block on all.

    Raises:
      FailedElsewhere: where the block itself came to its end.
    """
    failure = None
    try:
        yield
    except ConfigError as error:
        failure = error
    failed = runtime.agree(int(failure is not None))
    if failure is not None:
        raise failure
    if failed:
        raise FailedElsewhere


def check_same(runtime: "Runtime", content: bytes, error: ConfigError) -> None:
    """Raises `error`, on every process, unless all processes come with the same content."""
    digest = zlib.crc32(content) >> 1  # not negative as an int32
    if runtime.agree(digest) != -runtime.agree(-digest):
        raise error


def _place(config: DistributedConfig) -> tuple[str | None, int | None, int | None]:
    """Coordinator, number of processes and this one's, each None where JAX is to find out."""
    if config.local_processes:  # by titan.train.runtime.launch
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if config.coordinator_address:
        return config.coordinator_address, config.num_processes, config.process_id
    return None, None, None


def _check_port(address: str, num_processes: int) -> None:
    """Raises ConfigError where the coordinator could not listen, of which JAX at times dies without a message."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        socket.create_server(("", int(address.rpartition(":")[2])), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        raise _no_coordinator(address, num_processes, 0, str(error)) from error


def _no_coordinator(address: str, num_processes: int, process_id: int, reason: str) -> ConfigError:
    return ConfigError(
        "distributed.coordinator_address",
        f"process {process_id} of {num_processes} gets no coordinator at {address} ({reason})",
        "give the host of process 0 and a port that is free there",
    )


def _give_up(config: DistributedConfig, address: str | None, num_processes: int | None) -> NoReturn:
    error = ConfigError(
        "distributed.initialization_timeout_seconds",
        f"not all {num_processes or ''} processes came to {address or 'the coordinator that JAX found'} within "
        f"{config.initialization_timeout_seconds} s",
        "start all of them, each with a process_id of its own and process 0 on that host, see that they reach its "
        "port, or give more",
    )
    print(error, file=sys.stderr, flush=True)
    os._exit(2)
