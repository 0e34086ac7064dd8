"""Golden files: the resolved configuration of each recipe and variant as text, so that a review shows what changes."""

import pathlib

from titan.core.config.serialize import to_text
from titan.train.config.run import Config
from titan.train.recipes.registry import RECIPES


def configurations() -> dict[str, Config]:
    """Every recipe, and every variant as `NAME@HARDWARE`."""
    found = {}
    for name, recipe in RECIPES.items():
        found[name] = recipe.config
        found |= {f"{name}@{hardware}": variant.of(recipe.config) for hardware, variant in recipe.variants.items()}
    return found


def golden_files() -> dict[str, str]:
    """The text of each golden file by its name; the asterisk of several slices is an x."""
    return {f"{name.replace('*', 'x')}.txt": to_text(config) for name, config in configurations().items()}


def stale(folder: pathlib.Path) -> list[str]:
    """The files of a folder that are missing, differ, or belong to no recipe; in alphabetical order."""
    wanted = golden_files()
    present = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.txt")}
    return sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))


def rewrite(folder: pathlib.Path) -> list[str]:
    """Brings a folder up to date, and returns the names of the files that were stale."""
    wanted, changed = golden_files(), stale(folder)
    for name in changed:
        if name in wanted:
            (folder / name).write_text(wanted[name], encoding="utf-8")
        else:
            (folder / name).unlink()
    return changed
