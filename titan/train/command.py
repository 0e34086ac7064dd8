"""`titan-train RECIPE --flags`, also as `python -m titan.train RECIPE --flags`: any recipe by its name."""

import os
import sys
from collections.abc import Sequence

from titan.core.config.flags import one_line_errors
from titan.core.config.validate import ConfigError
from titan.core.plugins import load_plugins, plugins_of
from titan.core.registry import RegistryError
from titan.train.main import main
from titan.train.recipes.registry import RECIPES
from titan.train.runtime.environment import restart_with_tunables

_USAGE = """Usage: {program} RECIPE [--section.field=value ...]

Trains a recipe as changed by the flags; {program} RECIPE --help lists a recipe's flags and variants.
Recipes: {recipes}"""


def command(argv: Sequence[str] | None = None) -> int:
    """Runs a recipe by its name.

    Args:
      argv: the command line; None: that of the process.

    Returns:
      The exit code; see `titan.train.main.main`.
    """
    if argv is None:
        restart_with_tunables()
    program, *arguments = sys.argv if argv is None else argv
    program = "python -m titan.train" if program.endswith("__main__.py") else os.path.basename(program)
    with one_line_errors():
        load_plugins(plugins_of(arguments))
        usage = _USAGE.format(program=program, recipes=", ".join(RECIPES))
        if not arguments or arguments[0] in ("-h", "--help"):
            print(usage)
            return 0 if arguments else 2
        name, *flags = arguments
        if name.startswith("-"):
            raise ConfigError("", f"{name} stands where the name of a recipe is expected", f"{program} RECIPE {name}")
        try:
            recipe = RECIPES[name]
        except RegistryError as error:
            raise ConfigError("", str(error), f"{program} --help") from None
    return main(recipe.config, [f"{program} {name}", *flags], variants=recipe.variants)
