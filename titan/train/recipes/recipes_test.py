"""Golden configurations: the resolved tree of each recipe, so that a review shows what a change of a default changes.

After a change on purpose: `./bazelw run //titan/train:NAME -- --print_config > titan/train/recipes/golden/NAME.txt`;
for a variant `--variant=HARDWARE --print_config > .../NAME@HARDWARE.txt`, with x for the asterisk of several slices.
"""

import dataclasses
import pathlib

import pytest

from titan.core.config.serialize import from_json, to_json, to_text
from titan.core.config.validate import validate
from titan.core.tpu_slice import parse_tpu_slice
from titan.train.config.compile import AotConfig
from titan.train.config.run import Config
from titan.train.recipes import (
    flux_debug,
    flux_dev,
    llama3_8b,
    llama3_70b,
    llama3_405b,
    llama3_debug,
    muse_glimmer_30b,
    muse_glimmer_debug,
    qwen3_0_6b,
    qwen3_8b,
    qwen3_30b_a3b,
    qwen3_32b,
    qwen3_235b_a22b,
    qwen3_debug,
    qwen3_moe_debug,
)

MODULES = (
    *(llama3_debug, llama3_8b, llama3_70b, llama3_405b),
    *(qwen3_debug, qwen3_0_6b, qwen3_8b, qwen3_32b, qwen3_moe_debug, qwen3_30b_a3b, qwen3_235b_a22b),
    *(muse_glimmer_debug, muse_glimmer_30b),
    *(flux_debug, flux_dev),
)
RECIPES = {module.RECIPE.name: module.RECIPE for module in MODULES}
VARIANTS = {
    f"{module.RECIPE.name}@{hardware}": (variant, module.RECIPE)
    for module in MODULES
    for hardware, variant in getattr(module, "VARIANTS", {}).items()
}
CONFIGS = {**RECIPES, **{name: variant.of(recipe) for name, (variant, recipe) in VARIANTS.items()}}
GOLDEN = pathlib.Path(__file__).with_name("golden")


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration_is_valid_and_as_its_golden_file_says(name):
    validate(CONFIGS[name])
    assert to_text(CONFIGS[name]) == (GOLDEN / f"{name.replace('*', 'x')}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RECIPES)
def test_config_file_of_a_run_brings_back_the_recipe_with_its_family(name):
    assert from_json(to_json(RECIPES[name]), Config) == RECIPES[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_fills_its_slice(name):
    variant, recipe = VARIANTS[name]
    hardware = name.partition("@")[2]
    num_devices = parse_tpu_slice(hardware).num_devices
    assert variant.data_parallel_shard * variant.data_parallel_replicate == num_devices
    config = dataclasses.replace(variant.of(recipe), hardware=hardware, aot=AotConfig(enable=True))
    validate(config)
    assert config.training.batch_size % num_devices == 0
    assert variant.source


def test_each_golden_file_has_a_configuration():
    assert {path.stem for path in GOLDEN.iterdir()} == {name.replace("*", "x") for name in CONFIGS}
