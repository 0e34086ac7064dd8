"""Golden configurations, and what every recipe and variant has to satisfy.

After a change on purpose: `./bazelw run //tools:golden`.
"""

import dataclasses
import pathlib

import pytest

from titan.core.config.serialize import from_json, to_json
from titan.core.config.validate import validate
from titan.core.tpu_slice import parse_tpu_slice
from titan.train.config.compile import AotConfig
from titan.train.config.run import Config
from titan.train.recipes.golden import configurations, rewrite, stale
from titan.train.recipes.registry import RECIPES

CONFIGS = configurations()
VARIANTS = [
    (name, hardware, variant) for name, recipe in RECIPES.items() for hardware, variant in recipe.variants.items()
]
GOLDEN = pathlib.Path(__file__).with_name("golden")


def test_every_recipe_has_a_program_of_its_own():
    constants: dict = {}
    exec(GOLDEN.with_name("recipes.bzl").read_text(encoding="utf-8"), constants)
    own = {name for name, recipe in RECIPES.items() if recipe.config_name.startswith("titan.train.recipes.")}
    assert set(constants["RECIPES"]) == own


def test_golden_files_are_up_to_date():
    assert stale(GOLDEN) == [], "./bazelw run //tools:golden rewrites them"


def test_stale_files_are_found_and_rewritten(tmp_path):
    (tmp_path / "no_recipe.txt").write_text("")
    (tmp_path / "llama3_debug.txt").write_text("")
    assert {"no_recipe.txt", "llama3_debug.txt", "qwen3_debug.txt"} <= set(stale(tmp_path))
    rewrite(tmp_path)
    assert stale(tmp_path) == []


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration_is_valid(name):
    validate(CONFIGS[name])


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_is_named_after_its_recipe(name):
    assert RECIPES[name].config.name == name


@pytest.mark.parametrize("name", RECIPES)
def test_config_file_of_a_run_brings_back_the_recipe_with_its_family(name):
    assert from_json(to_json(RECIPES[name].config), Config) == RECIPES[name].config


@pytest.mark.parametrize(("name", "hardware", "variant"), VARIANTS)
def test_a_variant_fills_its_slice(name, hardware, variant):
    num_devices = parse_tpu_slice(hardware).num_devices
    config = variant.of(RECIPES[name].config)
    config = dataclasses.replace(config, hardware=hardware, aot=AotConfig(enable=True))
    validate(config)
    # No axis is left to be filled up by whatever devices there are.
    parallelism = config.parallelism
    stated = [getattr(parallelism, axis) for axis in ("data_parallel_shard", "data_parallel_replicate")]
    assert min(stated) >= 1
    assert parallelism.resolve(num_devices).num_devices == num_devices
    assert variant.source
