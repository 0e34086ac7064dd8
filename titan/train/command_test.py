"""`titan-train`: recipes by name."""

import pytest

from titan.train import command as command_module
from titan.train.command import command
from titan.train.recipes import registry


def test_the_recipe_is_run_with_its_variants(monkeypatch):
    calls = []
    monkeypatch.setattr(command_module, "main", lambda *args, **kwargs: calls.append((args, kwargs)) or 7)
    assert command(["titan-train", "llama3_8b", "--training.steps=3"]) == 7
    recipe = registry.RECIPES["llama3_8b"]
    assert calls == [((recipe.config, ["titan-train llama3_8b", "--training.steps=3"]), {"variants": recipe.variants})]
    assert "v6e-2x4" in recipe.variants


@pytest.mark.parametrize(("argv", "code"), [((), 2), (("--help",), 0)])
def test_help_lists_the_recipes(argv, code, capsys):
    assert command(["titan-train", *argv]) == code
    assert "qwen3_moe_debug" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("llama3_degub", "there is no recipe 'llama3_degub'; did you mean 'llama3_debug'?"),
        ("--training.steps=3", "--training.steps=3 stands where the name of a recipe is expected"),
    ],
)
def test_a_mistake_is_one_line(argument, message, capsys):
    with pytest.raises(SystemExit) as error:
        command(["titan-train", argument])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_recipe_of_a_plugin_is_found(monkeypatch, tmp_path):
    (tmp_path / "their_recipes.py").write_text(
        "import dataclasses\n"
        "from titan.train.recipes.llama3_debug import RECIPE as base\n"
        "from titan.train.recipes.registry import register_recipe\n"
        "RECIPE = dataclasses.replace(base, name='theirs')\n"
        "register_recipe('theirs', 'their_recipes:RECIPE')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry.RECIPES, "_entries", dict(registry.RECIPES._entries))
    calls = []
    monkeypatch.setattr(command_module, "main", lambda *args, **kwargs: calls.append((args, kwargs)) or 0)
    assert command(["titan-train", "theirs", "--plugins=their_recipes"]) == 0
    ((recipe, _), options) = calls[0]
    assert recipe.name == "theirs" and options["variants"] == {}
