"""What a kernel is being lowered for: platform and kind of device, which choose its implementation and tiles."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax

from titan.kernels.generations import generation_of


@dataclasses.dataclass(frozen=True)
class Target:
    """What a program is for.

    Attributes:
      platform: JAX's name of the platform: "cpu", "gpu", "tpu".
      device_kind: `jax.Device.device_kind`, such as "TPU v6 lite".
    """

    platform: str
    device_kind: str = ""

    @property
    def generation(self) -> str:
        """The TPU generation by the name that topologies use ("v6e"); "" for what is no TPU.

        Raises:
          titan.kernels.generations.UnknownTpuError: it is a TPU of no known generation.
        """
        return generation_of(self.device_kind) if self.platform == "tpu" else ""


_TARGET: contextvars.ContextVar[Target | None] = contextvars.ContextVar("titan_kernel_target", default=None)


def current_target() -> Target:
    """The target that `lowering_for` set; without one, JAX's default device."""
    target = _TARGET.get()
    if target is not None:
        return target
    device = jax.config.jax_default_device
    if not isinstance(device, jax.Device):
        device = jax.devices(device)[0]  # a platform's name, or None for the default one
    return Target(device.platform, device.device_kind)


@contextlib.contextmanager
def lowering_for(target: Target) -> Iterator[None]:
    """Within it, kernels are traced for `target`."""
    token = _TARGET.set(target)
    try:
        yield
    finally:
        _TARGET.reset(token)
