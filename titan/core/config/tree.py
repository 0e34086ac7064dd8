"""Leaves of the configuration tree: `option` declares a field together with its documentation and limits."""

import dataclasses
from typing import Any


def option(
    default: Any,
    help: str,  # noqa: A002 (the name that argparse and absl use)
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field with a default, a help text, and the values it admits.

    Args:
      default: the value when no flag sets it; a nested dataclass or a tuple may be given as it is, since both are immutable.
      help: one or two sentences shown by `--helpfull`, with the unit and what an empty or zero value means.
      choices: the admitted strings, for a leaf of type str.
      minimum: the smallest admitted number.
      maximum: the largest admitted number.
    """
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum}
    if dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
