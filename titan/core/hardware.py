"""TPU hardware table, and the matmul speed of the machine at hand where no table speaks for it."""

import dataclasses
import pathlib
import time
import types
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One TPU generation, as its vendor states it. A chip may show itself to JAX as several devices.

    Attributes:
      peak_bf16_flops: dense bfloat16 FLOP/s of one chip.
      hbm_bytes: memory of one chip in bytes, the stated GB read as 10**9, the smaller reading.
      hbm_bytes_per_second: bandwidth of one chip's memory.
      ici_link_bytes_per_second: bandwidth of one link between chips, in one direction; a chip has two for each dim of
        a slice.
      mxu_flops_per_cycle: of the matrix units behind one device; the clock is the peak divided by it.
      usable_hbm_bytes: memory of one device that XLA:TPU lets a program have, as its out-of-memory error states it.
      devices_per_chip: JAX devices that one chip presents.
      slice_dims: dims of the torus that the interconnect of a slice forms.
      pod_chips: chips of the largest slice.
      device_kinds: values of `jax.Device.device_kind` that mean this generation.
    """

    peak_bf16_flops: float
    hbm_bytes: int
    hbm_bytes_per_second: float
    ici_link_bytes_per_second: float
    mxu_flops_per_cycle: int
    usable_hbm_bytes: int
    devices_per_chip: int
    slice_dims: int
    pod_chips: int
    device_kinds: tuple[str, ...]

    @property
    def clock_hz(self) -> float:
        """Cycles per second of the matrix units."""
        return self.peak_bf16_flops / self.devices_per_chip / self.mxu_flops_per_cycle

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Which dims of a slice of this shape are rings of chips, their ends being joined.

        In three dims all or none: optical switches join whole cubes of 4x4x4 chips. In two a whole side of the pod.
        """
        if self.slice_dims == 3:
            return (all(size % 4 == 0 for size in shape),) * len(shape)
        return tuple(size % 16 == 0 for size in shape)


_HARDWARE = {
    "v5e": Hardware(
        peak_bf16_flops=197e12,
        hbm_bytes=16 * 10**9,
        hbm_bytes_per_second=819e9,
        ici_link_bytes_per_second=50e9,
        mxu_flops_per_cycle=4 * 2 * 128**2,
        usable_hbm_bytes=int(15.75 * 2**30),
        devices_per_chip=1,
        slice_dims=2,
        pod_chips=256,
        device_kinds=("TPU v5 lite", "TPU v5e"),
    ),
    "v5p": Hardware(
        peak_bf16_flops=459e12,
        hbm_bytes=95 * 10**9,
        hbm_bytes_per_second=2765e9,
        ici_link_bytes_per_second=100e9,
        mxu_flops_per_cycle=8 * 2 * 128**2,
        usable_hbm_bytes=int(95.74 * 2**30),
        devices_per_chip=1,
        slice_dims=3,
        pod_chips=8960,
        device_kinds=("TPU v5", "TPU v5p"),
    ),
    "v6e": Hardware(
        peak_bf16_flops=918e12,
        hbm_bytes=32 * 10**9,
        hbm_bytes_per_second=1640e9,
        ici_link_bytes_per_second=100e9,
        mxu_flops_per_cycle=4 * 2 * 256**2,
        usable_hbm_bytes=int(31.25 * 2**30),
        devices_per_chip=1,
        slice_dims=2,
        pod_chips=256,
        device_kinds=("TPU v6 lite", "TPU v6e"),
    ),
    "tpu7x": Hardware(
        peak_bf16_flops=2307e12,
        hbm_bytes=192 * 10**9,
        hbm_bytes_per_second=7380e9,
        ici_link_bytes_per_second=100e9,
        mxu_flops_per_cycle=4 * 2 * 256**2,
        usable_hbm_bytes=int(94.75 * 2**30),
        devices_per_chip=2,
        slice_dims=3,
        pod_chips=9216,
        device_kinds=("TPU7x", "TPU v7x", "TPU v7"),
    ),
}

HARDWARE: Mapping[str, Hardware] = types.MappingProxyType(_HARDWARE)
"""The TPU generations titan knows, by the name that topologies use (`v6e:2x4`)."""


def register_hardware(name: str, hardware: Hardware) -> None:
    """Adds a TPU generation; what kernels need to know of it is `titan.kernels.generations.register_generation`'s.

    Args:
      name: as topologies of libtpu and `--hardware` call it.
      hardware: its figures.

    Raises:
      ValueError: the name, or a device kind, is taken.
    """
    if _HARDWARE.get(name) == hardware:
        return
    if name in _HARDWARE:
        raise ValueError(f"there are two TPU generations {name!r}")
    for kind in hardware.device_kinds:
        if find_generation(kind):
            raise ValueError(f"TPU generation {name!r}: device kind {kind!r} is that of {find_generation(kind)!r}")
    _HARDWARE[name] = hardware


def find_generation(device_kind: str) -> str | None:
    """The table's key for a `jax.Device.device_kind` or a topology's name ("v6e"); None if there is none."""
    name = device_kind.lower()
    if name in HARDWARE:
        return name
    kinds = ((key, kind) for key, hardware in HARDWARE.items() for kind in hardware.device_kinds)
    return next((key for key, kind in kinds if kind.lower() == name), None)


def find_hardware(device_kind: str) -> Hardware | None:
    """The table's entry for a `jax.Device.device_kind` or a topology's name ("v6e"); None if there is none."""
    generation = find_generation(device_kind)
    return HARDWARE[generation] if generation else None


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of one chip of this kind, or None when the table has none."""
    hardware = find_hardware(device_kind)
    return hardware.peak_bf16_flops if hardware else None


def num_chips(num_devices: int, device_kind: str) -> int:
    """Chips behind `num_devices` JAX devices; a device the table does not know counts as a chip."""
    hardware = find_hardware(device_kind)
    return -(-num_devices // hardware.devices_per_chip) if hardware else num_devices


def accelerator_present() -> bool:
    """Whether this machine shows a TPU or an NVIDIA GPU, by its device files; nothing is initialised."""
    files = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "dxg")
    return any(next(pathlib.Path("/dev").glob(pattern), None) for pattern in files)


def measured_matmul_peak(num_devices: int = 0, *, dtype: str = "float32", budget_seconds: float = 0.3) -> float:
    """FLOP/s that all devices of this process reach together in square matmuls, the best of several timed calls.

    It stands in for the table on machines the table has no entry for, above all CPUs, where virtual devices share
    the cores. It is a measurement: it varies by some per cent, and with what else the machine does.

    Args:
      num_devices: how many local devices multiply at once; 0 takes all.
      dtype: of the operands, as jax.numpy spells it.
      budget_seconds: wall time for the timed calls; compilation comes on top (about 0.1 s on a CPU).
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    devices = jax.local_devices()[: num_devices or None]
    if num_devices > len(devices):
        raise ValueError(f"measured_matmul_peak: asked for {num_devices} devices, this process has {len(devices)}")
    dim = 1024 if devices[0].platform == "cpu" else 8192
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
    make = jax.jit(lambda: jnp.full((len(devices), dim, dim), 1 / dim, dtype), out_shardings=sharding)
    multiply = jax.jit(lambda a_BMM: jnp.matmul(a_BMM, a_BMM), out_shardings=sharding)

    operand = make()
    multiply(operand).block_until_ready()  # compiles, and wakes the thread pool
    best_seconds = float("inf")
    deadline = time.perf_counter() + budget_seconds
    while time.perf_counter() < deadline or best_seconds == float("inf"):
        start = time.perf_counter()
        multiply(operand).block_until_ready()
        best_seconds = min(best_seconds, time.perf_counter() - start)
    return 2.0 * len(devices) * dim**3 / best_seconds
