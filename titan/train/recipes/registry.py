"""The recipes by name, titan's own and those of plugins. A recipe is a file of this folder: nothing lists it."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping

import titan.train.recipes
from titan.core.registry import Registry, load
from titan.train.config.run import Config
from titan.train.config.variant import Variant

_SHARED = ("_test", "_pretraining", ".registry", ".golden")  # endings of modules that are no recipes


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Where a recipe is found; it is imported when it is asked for.

    Attributes:
      config_name: "package.module:attribute" of the `Config`.
      variants_name: the same of its `Variants`; empty if it has none.
    """

    config_name: str
    variants_name: str = ""

    @property
    def config(self) -> Config:
        """The configuration."""
        return load(self.config_name)

    @property
    def variants(self) -> Mapping[str, Variant]:
        """The variants by the name of their slice."""
        if not self.variants_name:
            return {}
        module, _, attribute = self.variants_name.partition(":")
        return getattr(importlib.import_module(module), attribute, {})


RECIPES: Registry[Recipe] = Registry("recipe")
"""Every recipe, by the name that `titan-train` takes."""


def register_recipe(name: str, config: str, variants: str = "") -> None:
    """Adds a recipe.

    Args:
      name: what `titan-train` and `python -m titan.train` call it.
      config: "package.module:RECIPE", a `Config`.
      variants: "package.module:VARIANTS", its `Variants`.

    Raises:
      RegistryError: the name is taken.
    """
    RECIPES.register(name, Recipe(config, variants))


for _module in pkgutil.iter_modules(titan.train.recipes.__path__, "titan.train.recipes."):
    if not _module.name.endswith(_SHARED):
        register_recipe(_module.name.rpartition(".")[2], f"{_module.name}:RECIPE", f"{_module.name}:VARIANTS")
