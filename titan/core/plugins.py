"""Plugins: modules from outside that register what they add, imported before a program reads its flags.

A plugin is named by `--plugins=my_package.titan_plugin`, or is an entry point of an installed wheel:

    [project.entry-points."titan.plugins"]
    my_package = "my_package.titan_plugin"

It should be light: register dotted names, and import torch and JAX in the modules that these name.
"""

import importlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Sequence

from titan.core.config.validate import ConfigError

ENTRY_POINTS = "titan.plugins"
"""The group of entry points that are plugins."""


def plugins_of(argv: Sequence[str]) -> tuple[str, ...]:
    """The modules that a command line asks for, by `--plugins` and by the configuration that `--config_file` names.

    Nothing is checked here: a file that cannot be read or a flag without a value is refused when the flags are parsed.
    """
    names: list[str] = []
    for index, argument in enumerate(argv):
        flag, is_joined, value = argument.partition("=")
        if not is_joined:
            value = argv[index + 1] if index + 1 < len(argv) else ""
        if flag.lstrip("-") == "plugins" and argument.startswith("-"):
            names += [name.strip() for name in value.split(",") if name.strip()]
        elif flag.lstrip("-") == "config_file" and argument.startswith("-"):
            names += _plugins_of_file(value)
    return tuple(dict.fromkeys(names))


def _plugins_of_file(path: str) -> list[str]:
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            names = json.load(file).get("plugins", [])
    except (OSError, ValueError, AttributeError):
        return []
    return [name for name in names if isinstance(name, str)]


def load_plugins(names: Iterable[str] = ()) -> tuple[str, ...]:
    """Imports the plugins of installed wheels, and then those named.

    Returns:
      What was imported: dotted names of modules.

    Raises:
      ConfigError: a plugin cannot be imported.
    """
    installed = [entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    loaded = tuple(dict.fromkeys([*installed, *names]))
    for name in loaded:
        try:
            importlib.import_module(name.partition(":")[0])
        except Exception as error:  # whatever the module raises
            raise ConfigError(
                "plugins",
                f"{name} cannot be imported ({type(error).__name__}: {error})",
                "give the dotted name of a module on the Python path"
                if name not in installed
                else "mend or uninstall the package that brings it",
            ) from error
    return loaded
