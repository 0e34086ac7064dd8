"""Options of the XLA:TPU compiler in named bundles, and what a choice of them amounts to.

The bundles are data: every option in them is accepted by libtpu 0.0.42 and changes the program of a training step on
the generations that its bundle names (docs/aot.md, "Compiler options"). What is on by default anyway is not in them.
Imports neither torch nor jax.
"""

import dataclasses
import difflib
import re
import types
from collections.abc import Mapping, Sequence

from titan.core.config.validate import ConfigError

_BUNDLES_FLAG, _OPTIONS_FLAG = "compile.tpu_flag_bundles", "compile.tpu_flags"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SPARSE_CORE = "xla_tpu_enable_sparse_core_collective_offload_"


@dataclasses.dataclass(frozen=True)
class FlagBundle:
    """Compiler options that go together.

    Attributes:
      purpose: what they do, in one sentence.
      options: their values by name, as the compiler reads them.
      generations: keys of `titan.core.hardware.HARDWARE` on which they change the program.
    """

    purpose: str
    options: Mapping[str, str]
    generations: tuple[str, ...]


TPU_FLAG_BUNDLES: Mapping[str, FlagBundle] = types.MappingProxyType(
    {
        "scoped_vmem_48m": FlagBundle(
            "Lets a fusion or kernel use 48 MiB of vector memory (by default 16 MiB on v5p, 32 MiB on v6e and tpu7x).",
            {"xla_tpu_scoped_vmem_limit_kib": "49152"},
            ("v5p", "v6e", "tpu7x"),
        ),
        "no_latency_hiding": FlagBundle(
            "Schedules without moving computation under transfers: less memory, exposed collectives.",
            {"xla_tpu_enable_latency_hiding_scheduler": "false"},
            ("v5e", "v5p", "v6e", "tpu7x"),
        ),
        "sparse_core_offload": FlagBundle(
            "Runs collectives on the SparseCores, so that the TensorCores go on computing; tpu7x does so by default.",
            {f"{_SPARSE_CORE}{kind}": "true" for kind in ("all_gather", "reduce_scatter", "all_reduce")},
            ("v6e",),
        ),
        "no_sparse_core_offload": FlagBundle(
            "Keeps collectives on the TensorCores.",
            {f"{_SPARSE_CORE}{kind}": "false" for kind in ("all_gather", "reduce_scatter", "all_reduce")},
            ("tpu7x",),
        ),
    }
)
"""The bundles that `--compile.tpu_flag_bundles` takes, by name."""


def check_tpu_flags(bundles: Sequence[str], flags: Sequence[str]) -> None:
    """Checks a choice of bundles and single options, whatever it is compiled for.

    Args:
      bundles: keys of `TPU_FLAG_BUNDLES`.
      flags: options as "NAME=VALUE".

    Raises:
      ConfigError: a bundle is unknown, an option malformed, or one option is given two values by two bundles or twice
        in `flags`.
    """
    chosen: dict[str, tuple[str, str]] = {}
    for bundle in bundles:
        if bundle not in TPU_FLAG_BUNDLES:
            close = difflib.get_close_matches(bundle, TPU_FLAG_BUNDLES, n=1)
            question = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(
                _BUNDLES_FLAG, f"there is no bundle {bundle!r}", f"{question}there are {', '.join(TPU_FLAG_BUNDLES)}"
            )
        for name, value in TPU_FLAG_BUNDLES[bundle].options.items():
            other, before = chosen.setdefault(name, (bundle, value))
            if before != value:
                raise ConfigError(
                    _BUNDLES_FLAG, f"{other} sets {name}={before} and {bundle} {name}={value}", "leave one of them out"
                )
    _pairs(flags)


def tpu_compiler_options(bundles: Sequence[str], flags: Sequence[str], generation: str | None) -> dict[str, str]:
    """The compiler options that a choice amounts to: those of the bundles, overridden by single ones.

    Args:
      bundles, flags: see `check_tpu_flags`.
      generation: of the TPU, a key of `titan.core.hardware.HARDWARE`; None if it is not in that table.

    Raises:
      ConfigError: as `check_tpu_flags`; or a bundle does nothing on this generation.
    """
    check_tpu_flags(bundles, flags)
    options: dict[str, str] = {}
    for bundle in bundles:
        if generation is not None and generation not in TPU_FLAG_BUNDLES[bundle].generations:
            raise ConfigError(
                _BUNDLES_FLAG,
                f"{bundle} is for {', '.join(TPU_FLAG_BUNDLES[bundle].generations)}: on {generation} it has no effect",
                "leave it out",
            )
        options |= TPU_FLAG_BUNDLES[bundle].options
    return options | _pairs(flags)


def _pairs(flags: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for flag in flags:
        name, equals, value = flag.strip().removeprefix("--").partition("=")
        if not equals or not value or not _NAME.fullmatch(name):
            raise ConfigError(
                _OPTIONS_FLAG, f"{flag!r} is no option with its value", "write NAME=VALUE, separated by commas"
            )
        if pairs.setdefault(name, value) != value:
            raise ConfigError(_OPTIONS_FLAG, f"{name} is {pairs[name]!r} and {value!r}", "give it once")
    return pairs
