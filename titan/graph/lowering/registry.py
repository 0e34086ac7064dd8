"""Modules with lowerings from outside. Imports nothing heavy, so that a plugin may call it before flags are parsed."""

import importlib
import sys

LOWERING_MODULES: list[str] = []
"""Dotted names of modules that `titan.graph.lowering.ops` imports besides titan's own."""


def register_lowerings(module: str) -> None:
    """Has a module imported when the table of lowerings is filled.

    Args:
      module: dotted name of a module whose functions are decorated with `titan.graph.lowering.table.lowering`.

    Raises:
      ImportError: the table is filled already, and there is no such module.
    """
    if module in LOWERING_MODULES:
        return
    LOWERING_MODULES.append(module)
    if "titan.graph.lowering.ops" in sys.modules:
        importlib.import_module(module)
