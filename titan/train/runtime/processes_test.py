"""Joining the processes of a run, with one line where that fails; and what they agree on."""

import dataclasses
import socket
import subprocess
import sys

import jax
import pytest

from titan.core.config.validate import ConfigError
from titan.parallel.mesh import MeshSpec
from titan.train.config.compile import CompileConfig
from titan.train.config.processes import DistributedConfig
from titan.train.config.run import Config
from titan.train.runtime.processes import FailedElsewhere, check_same, on_all_processes
from titan.train.runtime.xla import XlaRuntime
from titan.train.step.stored_form import Stacks

CONFIG = Config(compile=CompileConfig(cache_folder=""))
OURS = ConfigError("data.path", "it is not there", "correct it")


class OneOfTwo:
    """A runtime whose other process gives what a function makes of this one's numbers."""

    def __init__(self, other):
        self._other = other

    def agree(self, number):
        return max(number, self._other(number))


def test_a_process_fails_with_its_own_error_or_because_another_does():
    with on_all_processes(OneOfTwo(lambda number: 0)):
        pass
    with pytest.raises(FailedElsewhere), on_all_processes(OneOfTwo(lambda number: 1)):
        pass
    with pytest.raises(ConfigError) as error, on_all_processes(OneOfTwo(lambda number: 0)):
        raise OURS
    assert error.value is OURS


def test_processes_with_other_content_are_found_whichever_has_the_larger_number():
    check_same(OneOfTwo(lambda number: number), b"content", OURS)
    for difference in (1, -1):
        with pytest.raises(ConfigError):
            check_same(OneOfTwo(lambda number, by=difference: number + by if number > 0 else number - by), b"x", OURS)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "coordinator_address={address}, num_processes=2, process_id={process_id}, initialization_timeout_seconds=1",
            "--distributed.initialization_timeout_seconds: not all 2 processes came to {address} within 1 s; start all "
            "of them, each with a process_id of its own and process 0 on that host, see that they reach its port, or "
            "give more",
        ),
        (
            "enable=True",
            "--distributed.enable: JAX finds no cluster that this process belongs to (coordinator_address should be "
            "defined.); leave it out for a run of one process, or give --distributed.coordinator_address, "
            "num_processes and process_id",
        ),
    ],
    ids=["nobody_comes", "no_cluster"],
)
def test_processes_that_cannot_join_end_with_one_line(flags, line):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    for process_id in (0, 1) if "process_id" in flags else (0,):
        arguments = flags.format(address=f"'{address}'", process_id=process_id)
        ended = _join(arguments)
        assert (ended.returncode, ended.stderr) == (2, line.format(address=address) + "\n")


def test_a_port_that_is_taken_is_named():
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::", 0))
        other.listen()
        address = f"localhost:{other.getsockname()[1]}"
        ended = _join(f"coordinator_address='{address}', num_processes=2, process_id=0")
    assert ended.returncode == 2
    line = ended.stderr.splitlines()[-1]
    assert line.startswith(f"--distributed.coordinator_address: process 0 of 2 gets no coordinator at {address} (")
    assert line.endswith("); give the host of process 0 and a port that is free there")


def _join(arguments: str) -> subprocess.CompletedProcess:
    program = (
        "from titan.core.config.flags import one_line_errors\n"
        "from titan.train.runtime.processes import join\n"
        "from titan.train.config.processes import DistributedConfig\n"
        f"with one_line_errors(): join(DistributedConfig({arguments}))\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)


def _validate(**values):
    config = DistributedConfig(**values)
    config.validate()
    return config


def test_processes_are_asked_for_in_three_ways_or_not_at_all():
    assert not _validate().is_asked_for
    assert _validate(enable=True).is_asked_for
    assert _validate(local_processes=2).num_known_processes == 2
    given = _validate(coordinator_address="[fd00::2]:8482", num_processes=32, process_id=31)
    assert given.is_asked_for and given.num_known_processes == 32


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"num_processes": 2, "process_id": 1},
            "--distributed.coordinator_address: it is not given, and distributed.num_processes is; give all three of "
            "coordinator_address, num_processes and process_id, or --distributed alone where JAX can find the "
            "processes",
        ),
        (
            {"coordinator_address": "host:1", "num_processes": 2},
            "--distributed.process_id: it is not given, and distributed.coordinator_address is; give all three of "
            "coordinator_address, num_processes and process_id, or --distributed alone where JAX can find the "
            "processes",
        ),
        (
            {"coordinator_address": "10.0.0.2", "num_processes": 2, "process_id": 1},
            "--distributed.coordinator_address: '10.0.0.2' is no HOST:PORT; give the host of process 0 and a port that "
            "is free there, e.g. 10.0.0.2:8482",
        ),
        (
            {"coordinator_address": "host:0", "num_processes": 2, "process_id": 1},
            "--distributed.coordinator_address: 'host:0' is no HOST:PORT; give the host of process 0 and a port that "
            "is free there, e.g. 10.0.0.2:8482",
        ),
        (
            {"coordinator_address": "host:1", "num_processes": 2, "process_id": 2},
            "--distributed.process_id: 2 is not below distributed.num_processes=2; give 0 to 1, each to one process",
        ),
        (
            {"enable": True, "local_processes": 2},
            "--distributed.enable: distributed.local_processes=2 starts all processes itself; give one of the two",
        ),
    ],
    ids=["no_address", "no_number", "no_port", "port_0", "number_too_large", "two_ways"],
)
def test_what_does_not_go_together_is_refused(values, line):
    with pytest.raises(ConfigError) as error:
        _validate(**values)
    assert str(error.value) == line


def test_a_process_of_a_slice_that_has_not_joined_the_others_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 32)
    with pytest.raises(ConfigError) as error:
        XlaRuntime(CONFIG)
    assert str(error.value) == (
        "--distributed.enable: this is process 0 of 32 on the hosts of a slice, and they have not joined; add "
        "--distributed on all of them"
    )


def test_several_processes_take_all_of_their_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    runtime = XlaRuntime(CONFIG)
    with pytest.raises(ConfigError) as error:
        runtime.prepare(MeshSpec(("dp_shard",), (runtime.num_devices + 1,)), {}, Stacks())
    assert error.value.flag == "parallelism.num_devices"
    config = dataclasses.replace(
        CONFIG,
        distributed=DistributedConfig(local_processes=2),
        parallelism=dataclasses.replace(CONFIG.parallelism, num_devices=3),
    )
    with pytest.raises(ConfigError) as error:
        XlaRuntime(config)
    assert str(error.value) == (
        "--parallelism.num_devices: 3 devices cannot be spread equally over 2 processes; give a multiple of 2, or "
        "leave it out"
    )
