"""The TPU generations that kernels know: the one table of what a kernel has to be told about each."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Generation:
    """What kernels depend on of a TPU generation.

    Attributes:
      device_kinds: the values of `jax.Device.device_kind`.
      vmem_bytes: the vector memory that the compiler lets one kernel use by its default
        (`xla_tpu_scoped_vmem_limit_kib`).
      smallest_slice: chips of the smallest slice that libtpu describes, as in "v6e:2x2".
      flops_per_byte: peak dense bfloat16 FLOPs per byte of HBM traffic, as the vendor states both.
      moves_rows_by_dma: whether the fused linear cross-entropy gathers rows of its weight by one DMA each, which
        was faster there where measured.
    """

    device_kinds: tuple[str, ...]
    vmem_bytes: int
    smallest_slice: str
    flops_per_byte: float
    moves_rows_by_dma: bool = False


# VMEM: measured with libtpu 0.0.42.
_GENERATIONS = {
    "v5e": Generation(("TPU v5 lite", "TPU v5e"), 16 * MIB, "v5e:2x2", 197e12 / 819e9),
    "v5p": Generation(("TPU v5", "TPU v5p"), 16 * MIB, "v5p:2x2x1", 459e12 / 2765e9),
    "v6e": Generation(("TPU v6 lite", "TPU v6e"), 32 * MIB, "v6e:2x2", 918e12 / 1640e9),
    "tpu7x": Generation(
        ("TPU7x", "TPU v7x", "TPU v7"), 32 * MIB, "tpu7x:2x2x1", 2307e12 / 7380e9, moves_rows_by_dma=True
    ),
}

GENERATIONS: Mapping[str, Generation] = MappingProxyType(_GENERATIONS)
"""By the name that topologies use (`v6e:2x4`)."""


class UnknownTpuError(ValueError):
    """A TPU that no generation of the table names."""


def register_generation(name: str, generation: Generation) -> None:
    """Adds a generation; its peak and memory go into `titan.core.hardware.register_hardware`, under the same name.

    Raises:
      ValueError: the name or one of its device kinds is taken by another generation.
    """
    if _GENERATIONS.get(name) == generation:
        return
    taken = {kind: other for other, entry in _GENERATIONS.items() for kind in entry.device_kinds}
    for kind in generation.device_kinds:
        if kind in taken:
            raise ValueError(f"TPU generation {name!r}: device kind {kind!r} is that of {taken[kind]!r}")
    if name in _GENERATIONS:
        raise ValueError(f"there are two TPU generations {name!r}")
    _GENERATIONS[name] = generation


def find_generation(name: str) -> Generation:
    """The generation of this name.

    Raises:
      UnknownTpuError: there is none.
    """
    if name not in _GENERATIONS:
        raise UnknownTpuError(f"no TPU generation {name!r} is known: name one of {', '.join(_GENERATIONS)}")
    return _GENERATIONS[name]


def generation_of(device_kind: str) -> str:
    """The name of the generation of a TPU.

    Args:
      device_kind: a TPU's `jax.Device.device_kind`, such as "TPU v6 lite".

    Raises:
      UnknownTpuError: no generation has devices of this kind.
    """
    for name, generation in _GENERATIONS.items():
        if device_kind in generation.device_kinds:
            return name
    raise UnknownTpuError(
        f"TPUs of the kind {device_kind!r} are unknown: add their generation by "
        "titan.kernels.generations.register_generation"
    )
