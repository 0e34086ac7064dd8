"""Flags of a run over several processes: how they find one another, in jax.distributed's terms.

Imports neither torch nor jax.
"""

import dataclasses
import re

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError

NOT_GIVEN = -1
"""Value of `distributed.process_id` where it is not given."""


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The processes of a run of the xla executor on several hosts, one on each."""

    enable: bool = option(
        False,
        "This process is one of several. JAX finds the others: on Cloud TPU, of one slice or several and under GKE "
        "too, Slurm, Open MPI. Elsewhere give coordinator_address, num_processes and process_id in its place.",
    )
    coordinator_address: str = option("", "HOST:PORT of process 0, the same for all; the port must be free there.")
    num_processes: int = option(0, "Processes of the run. 0: JAX finds out.", minimum=0)
    process_id: int = option(
        NOT_GIVEN, "Number of this process, from 0; process 0 reports. -1: JAX finds out.", minimum=NOT_GIVEN
    )
    local_processes: int = option(
        0,
        "Start so many processes on this machine, to try on CPUs what several hosts do; each has its own virtual "
        "devices. 0: start none.",
        minimum=0,
    )
    initialization_timeout_seconds: int = option(
        300, "How long processes wait for one another at the start.", minimum=1
    )
    heartbeat_timeout_seconds: int = option(
        100, "A process that has not been heard of for so long has died, which ends the others.", minimum=1
    )

    @property
    def is_asked_for(self) -> bool:
        """Whether the run is to have several processes."""
        return self.enable or bool(self.coordinator_address) or self.local_processes > 0

    @property
    def num_known_processes(self) -> int:
        """Processes of the run as far as flags say; 1 where JAX is to find out."""
        return self.num_processes or self.local_processes or 1

    def validate(self) -> None:
        """Raises ConfigError unless all of coordinator_address, num_processes and process_id are given, or none."""
        given = {
            "coordinator_address": bool(self.coordinator_address),
            "num_processes": self.num_processes > 0,
            "process_id": self.process_id != NOT_GIVEN,
        }
        first = next((name for name, is_given in given.items() if is_given), None)
        if self.local_processes:
            for name in ["enable"] * self.enable + [first] * (first is not None):
                raise ConfigError(
                    f"distributed.{name}",
                    f"distributed.local_processes={self.local_processes} starts all processes itself",
                    "give one of the two",
                )
        if first is None:
            return
        for name, is_given in given.items():
            if not is_given:
                raise ConfigError(
                    f"distributed.{name}",
                    f"it is not given, and distributed.{first} is",
                    "give all three of coordinator_address, num_processes and process_id, or --distributed alone where "
                    "JAX can find the processes",
                )
        if not re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/]+):[0-9]+", self.coordinator_address) or not (
            0 < int(self.coordinator_address.rpartition(":")[2]) < 2**16
        ):
            raise ConfigError(
                "distributed.coordinator_address",
                f"{self.coordinator_address!r} is no HOST:PORT",
                "give the host of process 0 and a port that is free there, e.g. 10.0.0.2:8482",
            )
        if self.process_id >= self.num_processes:
            raise ConfigError(
                "distributed.process_id",
                f"{self.process_id} is not below distributed.num_processes={self.num_processes}",
                f"give 0 to {self.num_processes - 1}, each to one process",
            )
