"""Flags that a default would have made wrong."""

import pytest

from titan.core.config.flags import parse
from titan.core.config.validate import ConfigError
from titan.train.config.fit_defaults import fit_defaults
from titan.train.recipes.registry import RECIPES

DEBUG = [name for name in RECIPES if name.endswith("_debug")]


def _parsed(*flags, name="llama3_debug"):
    return parse([name, *flags], RECIPES[name].config, fit=fit_defaults)


@pytest.mark.parametrize("name", DEBUG)
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_any_number_of_steps_works(name, steps, capsys):
    config = _parsed(f"--training.steps={steps}", name=name)
    assert config.training.steps == steps
    assert config.lr_schedule.warmup_steps == max(steps // 2, 1)
    assert "--lr_schedule.warmup_steps: the default of" in capsys.readouterr().err


def test_what_is_given_is_not_changed(capsys):
    with pytest.raises(ConfigError, match="lr_schedule.warmup_steps: 20 are more than training.steps=6"):
        _parsed("--training.steps=6", "--lr_schedule.warmup_steps=20")
    assert _parsed("--training.steps=40").lr_schedule.warmup_steps == 20
    assert capsys.readouterr().err == ""


def test_a_profile_fits_into_a_short_run():
    profiler = _parsed("--training.steps=2", "--profiler.enable").profiler
    assert (profiler.start_step, profiler.num_steps) == (0, 2)
    profiler = _parsed("--training.steps=4", "--profiler.enable").profiler
    assert (profiler.start_step, profiler.num_steps) == (2, 2)


def test_a_small_vocabulary_is_the_tokenizers_too(capsys):
    assert _parsed("--model.vocab_size=300").tokenizer.vocab_size == 300
    assert "--tokenizer.vocab_size: the default of 512 is lowered to 300, for model.vocab_size=300" in (
        capsys.readouterr().err
    )
