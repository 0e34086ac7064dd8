"""Golden configurations: the resolved tree of each recipe, so that a review shows what a change of a default changes.

After a change on purpose: `./bazelw run //titan/train:NAME -- --print_config > titan/train/recipes/golden/NAME.txt`.
"""

import pathlib

import pytest

from titan.core.config.serialize import to_text
from titan.core.config.validate import validate
from titan.train.recipes import llama3_8b, llama3_70b, llama3_405b, llama3_debug

RECIPES = {module.RECIPE.name: module.RECIPE for module in (llama3_debug, llama3_8b, llama3_70b, llama3_405b)}
GOLDEN = pathlib.Path(__file__).with_name("golden")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_valid_and_as_its_golden_file_says(name):
    validate(RECIPES[name])
    assert to_text(RECIPES[name]) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_each_golden_file_has_a_recipe():
    assert {path.stem for path in GOLDEN.iterdir()} == RECIPES.keys()
