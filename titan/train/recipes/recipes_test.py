"""Golden configurations: the resolved tree of each recipe, so that a review shows what a change of a default changes.

After a change on purpose: `./bazelw run //titan/train:NAME -- --print_config > titan/train/recipes/golden/NAME.txt`.
"""

import pathlib

import pytest

from titan.core.config.serialize import from_json, to_json, to_text
from titan.core.config.validate import validate
from titan.train.config import Config
from titan.train.recipes import (
    llama3_8b,
    llama3_70b,
    llama3_405b,
    llama3_debug,
    qwen3_0_6b,
    qwen3_8b,
    qwen3_32b,
    qwen3_235b_a22b,
    qwen3_debug,
    qwen3_moe_debug,
)

MODULES = (
    *(llama3_debug, llama3_8b, llama3_70b, llama3_405b),
    *(qwen3_debug, qwen3_0_6b, qwen3_8b, qwen3_32b, qwen3_moe_debug, qwen3_235b_a22b),
)
RECIPES = {module.RECIPE.name: module.RECIPE for module in MODULES}
GOLDEN = pathlib.Path(__file__).with_name("golden")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_valid_and_as_its_golden_file_says(name):
    validate(RECIPES[name])
    assert to_text(RECIPES[name]) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RECIPES)
def test_config_file_of_a_run_brings_back_the_recipe_with_its_family(name):
    assert from_json(to_json(RECIPES[name]), Config) == RECIPES[name]


def test_each_golden_file_has_a_recipe():
    assert {path.stem for path in GOLDEN.iterdir()} == RECIPES.keys()
