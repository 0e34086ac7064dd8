"""Sections of flags that a plugin registers: flags, files, and processes."""

import dataclasses
import pickle

import pytest

from titan.core.config import sections
from titan.core.config.flags import parse
from titan.core.config.serialize import from_json, to_json, to_text
from titan.core.config.tree import option
from titan.core.config.trees_for_test import Root as Run


@dataclasses.dataclass(frozen=True)
class GadgetConfig:
    """A gadget in place of a widget.

    More about it.
    """

    enable: bool = option(False, "Use it.")
    size: int = option(3, "Its size.", minimum=1)


@pytest.fixture
def gadget(monkeypatch):
    monkeypatch.setattr(sections, "_SECTIONS", {})
    sections.register_section("gadget", GadgetConfig())


def test_a_section_is_flags_like_any_other(gadget, capsys):
    root = sections.with_sections(Run())
    assert parse(["x", "--gadget", "--gadget.size=5"], root).gadget == GadgetConfig(True, 5)
    assert isinstance(root, Run) and root.gadget == GadgetConfig()
    with pytest.raises(SystemExit):
        parse(["x", "--help"], root)
    assert "A gadget in place of a widget." in capsys.readouterr().out
    assert "gadget:  # GadgetConfig" in to_text(root)


def test_a_configuration_with_a_section_is_saved_sent_and_read(gadget):
    root = dataclasses.replace(sections.with_sections(Run()), gadget=GadgetConfig(size=7))
    assert pickle.loads(pickle.dumps(root)) == root
    assert from_json(to_json(root), type(root)) == root
    assert from_json(to_json(Run()), type(root)).gadget == GadgetConfig()  # saved before there was such a section


def test_without_sections_the_configuration_is_what_it_was():
    root = Run()
    assert sections.with_sections(root) is root


def test_clashes_are_errors(gadget):
    sections.register_section("gadget", GadgetConfig())  # a module imported twice
    with pytest.raises(ValueError, match="two sections 'gadget'"):
        sections.register_section("gadget", GadgetConfig(size=9))
    with pytest.raises(ValueError, match="instance of a frozen dataclass"):
        sections.register_section("other", GadgetConfig)
    field = dataclasses.fields(Run())[0].name
    sections.register_section(field, GadgetConfig())
    with pytest.raises(ValueError, match=f"section '{field}' is registered"):
        sections.with_sections(Run())
