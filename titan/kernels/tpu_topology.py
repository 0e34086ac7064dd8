"""TPU devices by the name of a slice, to compile for on a machine without a TPU."""

import functools
import importlib.util
import os

import jax

# Else libtpu asks the cloud's metadata server for this machine's TPUs, complains that there are none, and locks itself
# to one process. What it is told here does not matter: the topology says what to compile for.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
}


class MissingLibtpuError(RuntimeError):
    """libtpu, the TPU's compiler, is not installed.

    Attributes:
      problem, cure: the two parts of the message.
    """

    problem = "compiling for a TPU needs the libtpu package"
    cure = "pip install libtpu==0.0.42.1, or 0.0.52 with jax 0.12"

    def __init__(self):
        super().__init__(f"{self.problem}: {self.cure}")


def topology_devices(topology: str, *, num_slices: int = 1) -> tuple[jax.Device, ...]:
    """The devices of a slice, which programs can be compiled for and not run on.

    Args:
      topology: generation and chips along each dim, such as "v6e:2x4" or "tpu7x:4x4x8".
      num_slices: equal slices over the data-centre network; the devices of the first come first.

    Raises:
      MissingLibtpuError: the libtpu package is not installed.
      jax.errors.JaxRuntimeError: libtpu knows no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise MissingLibtpuError
    return _devices(topology, num_slices)


@functools.cache
def _devices(topology: str, num_slices: int) -> tuple[jax.Device, ...]:
    if jax.default_backend() != "tpu":
        for name, value in _NO_TPU.items():
            os.environ.setdefault(name, value)
    from jax.experimental import topologies

    options = {}
    if num_slices > 1:
        options["num_slices"] = num_slices
    if set(topology.partition(":")[2].split("x")) == {"1"}:
        options["chips_per_host_bounds"] = (1, 1, 1)  # a host has four or eight chips unless told so
    return tuple(topologies.get_topology_desc(topology, platform="tpu", **options).devices)
