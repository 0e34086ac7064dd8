"""The compiler options of a configuration for given devices, tried on the compiler before anything is captured."""

import logging
import re

import jax
from jax.sharding import SingleDeviceSharding

from titan.core.config.validate import ConfigError
from titan.core.hardware import find_generation
from titan.core.tpu_flags import tpu_compiler_options
from titan.train.config.compile import CompileConfig

_log = logging.getLogger(__name__)

# Errors of the XLA compiler (libtpu 0.0.42).
_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")
_NO_VALUE = re.compile(r"Failed to parse '(.*)' into flag (\w+)")


def compiler_options(config: CompileConfig, device: jax.Device) -> dict[str, str]:
    """The options that `--compile.tpu_flag_bundles` and `--compile.tpu_flags` amount to, by name.

    Args:
      config: the section `compile`.
      device: one of those that are compiled for, there or not. For other devices than TPUs the options are left out,
        and a line in the log says so.

    Raises:
      ConfigError: a bundle is not for this generation, or the compiler does not take an option or its value.
    """
    if not config.tpu_flag_bundles and not config.tpu_flags:
        return {}
    if device.platform != "tpu":
        given = " and ".join(f"--compile.{name}" for name in ("tpu_flag_bundles", "tpu_flags") if getattr(config, name))
        _log.warning("%s left out: the devices are %s, no TPUs", given, device.device_kind)
        return {}
    options = tpu_compiler_options(config.tpu_flag_bundles, config.tpu_flags, find_generation(device.device_kind))
    number = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x).lower(number).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise _refusal(config, device, str(error)) from error
    return options


def _refusal(config: CompileConfig, device: jax.Device, message: str) -> ConfigError:
    compiler = f"the TPU compiler ({device.client.platform_version.splitlines()[-1]})"
    if match := _UNKNOWN.search(message):
        name, problem = match[1], f"{compiler} has no option {match[1]!r}"
    elif match := _NO_VALUE.search(message):
        name, problem = match[2], f"{compiler} cannot read {match[1]!r} as a value of {match[2]}"
    else:
        name, problem = "", f"{compiler} refuses these options: {message.splitlines()[0]}"
    is_single = any(flag.strip().removeprefix("--").startswith(f"{name}=") for flag in config.tpu_flags)
    if not is_single and config.tpu_flag_bundles:
        return ConfigError("compile.tpu_flag_bundles", problem, "leave out the bundle, or use another libtpu")
    return ConfigError("compile.tpu_flags", problem, "correct it, or leave it out")
