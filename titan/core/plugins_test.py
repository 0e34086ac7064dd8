"""Plugins: which a command line asks for, and what becomes of one that cannot be imported."""

import importlib.metadata
import json
import sys

import pytest

from titan.core import plugins
from titan.core.config.validate import ConfigError


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_plugin_that_works.py").write_text("LOADED = True\n")
    (tmp_path / "a_plugin_that_fails.py").write_text("raise RuntimeError('no such accelerator')\n")
    yield tmp_path
    for name in ("a_plugin_that_works", "a_plugin_that_fails"):
        sys.modules.pop(name, None)


def test_plugins_are_named_by_flags_and_by_the_configuration_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"plugins": ["saved"]}))
    argv = ["llama3_debug", "--plugins=a.b,c", "--training.steps=3", "--plugins", "d", f"--config_file={path}"]
    assert plugins.plugins_of(argv) == ("a.b", "c", "d", "saved")
    assert plugins.plugins_of(["x", "--config_file=/no/such/file", "--plugins"]) == ()


def test_a_plugin_is_imported(modules):
    assert plugins.load_plugins(["a_plugin_that_works"]) == ("a_plugin_that_works",)
    assert sys.modules["a_plugin_that_works"].LOADED


def test_entry_points_of_installed_wheels_are_plugins(modules, monkeypatch):
    entry = importlib.metadata.EntryPoint("x", "a_plugin_that_works", plugins.ENTRY_POINTS)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda *, group: [entry] if group == "titan.plugins" else []
    )
    assert plugins.load_plugins() == ("a_plugin_that_works",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_plugin", "--plugins: no_such_plugin cannot be imported (ModuleNotFoundError: No module named"),
        ("a_plugin_that_fails", "cannot be imported (RuntimeError: no such accelerator); give the dotted name"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_one_line(modules, name, message):
    with pytest.raises(ConfigError) as error:
        plugins.load_plugins([name])
    assert message in str(error.value) and "\n" not in str(error.value)
