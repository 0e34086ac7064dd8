"""TPU slices by name: `v6e-2x4` is 2 by 4 chips of a v6e, `4*tpu7x-8x8x16` four slices that a network joins.

Imports neither torch nor jax.
"""

import dataclasses
import math
import re

from titan.core.config.validate import ConfigError
from titan.core.hardware import HARDWARE, Hardware

_NAME = re.compile(r"(?:(?P<num_slices>\d+)\*)?(?P<generation>[a-z]+\d\w*)-(?P<shape>\d+(?:x\d+)*)")
_EXAMPLES = "v5e-2x2, v5p-2x2x1, v6e-2x4, tpu7x-4x4x8 or 4*tpu7x-8x8x16"


@dataclasses.dataclass(frozen=True)
class TpuSlice:
    """Chips of one generation, joined by their own interconnect (ICI); or several equal slices, joined by the network.

    Attributes:
      generation: the key of `HARDWARE`, such as "v6e".
      shape: chips along each dim of one slice, e.g. (2, 4).
      num_slices: slices that the data-centre network (DCN) joins.
    """

    generation: str
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def hardware(self) -> Hardware:
        """The generation's entry of the hardware table."""
        return HARDWARE[self.generation]

    @property
    def num_chips(self) -> int:
        """Chips of all slices."""
        return self.num_slices * math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """JAX devices of all slices."""
        return self.num_chips * self.hardware.devices_per_chip

    @property
    def topology(self) -> str:
        """The name of one slice in the spelling of `jax.experimental.topologies`, e.g. "v6e:2x4"."""
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    def __str__(self) -> str:
        one = self.topology.replace(":", "-")
        return one if self.num_slices == 1 else f"{self.num_slices}*{one}"


def parse_tpu_slice(name: str, *, flag: str = "hardware") -> TpuSlice:
    """The slice that a name such as "v6e-2x4" or "4*tpu7x-8x8x16" stands for.

    Args:
      name: generation and chips along each dim, after the number of slices where there are several.
      flag: the flag that the name came from, for the error.

    Raises:
      ConfigError: the name is malformed, the generation unknown, or no such slice exists.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise ConfigError(flag, f"{name!r} names no TPU slice", f"write it as {_EXAMPLES}")
    generation = match["generation"]
    if generation not in HARDWARE:
        raise ConfigError(
            flag, f"{name!r}: there is no TPU generation {generation!r} in the table", f"give {', '.join(HARDWARE)}"
        )
    hardware = HARDWARE[generation]
    shape = tuple(map(int, match["shape"].split("x")))
    num_slices = int(match["num_slices"] or 1)
    example = {2: "2x4", 3: "2x2x1"}[hardware.slice_dims]
    if len(shape) != hardware.slice_dims:
        raise ConfigError(
            flag,
            f"{name!r} has {len(shape)} dims, slices of {generation} have {hardware.slice_dims}",
            f"write it as {generation}-{example}",
        )
    if min(shape) < 1 or num_slices < 1:
        raise ConfigError(flag, f"{name!r} has no chips", f"give at least {generation}-{example}")
    if any(size % 2 for size in shape[:2]) and math.prod(shape) > 1:
        raise ConfigError(
            flag,
            f"{name!r}: the chips of a {generation} come in blocks of 2x2, which do not fill this shape",
            "give even numbers for the first two dims, or a single chip",
        )
    if math.prod(shape) > hardware.pod_chips:
        raise ConfigError(
            flag,
            f"{name!r} has {math.prod(shape)} chips, a pod of {generation} has {hardware.pod_chips}",
            f"give a smaller slice, or several as 2*{generation}-{example}",
        )
    return TpuSlice(generation, shape, num_slices)
