"""Leaves of a tree and their replacement."""

import dataclasses

import pytest

from titan.core.config.tree import leaves, option, replace_leaves
from titan.core.config.trees_for_test import Inner, Other, Root, Section


def test_leaves_have_paths_in_order_of_declaration():
    assert [leaf.path for leaf in leaves(Root())] == [
        "name", "section.steps", "section.kind", "section.enable", "section.inner.epsilon", "section.inner.tags",
        "section.inner.sizes", "second.epsilon", "second.tags", "second.sizes",
    ]  # fmt: skip
    steps = list(leaves(Root()))[1]
    assert (steps.type, steps.value, steps.help, steps.minimum) == (int, 3, "Steps of the run.", 1)
    assert "section.either.depth" in [leaf.path for leaf in leaves(Root(section=Section(either=Other())))]


@pytest.mark.parametrize(
    ("annotation", "field"),
    [(int, dataclasses.field(default=1)), (dict, option(None, "Help.")), (int | None, option(None, "Help."))],
)
def test_fields_that_are_no_leaves_are_refused(annotation, field):
    tree = dataclasses.make_dataclass("Wrong", [("field", annotation, field)], frozen=True)()
    with pytest.raises(TypeError, match=r"Wrong\.field: a leaf of a configuration tree is declared with option\(\)"):
        list(leaves(tree))


def test_choices_that_are_no_strings_are_refused():
    with pytest.raises(TypeError, match=r"choices of an option are strings, not \(0, 3\)"):
        option(0, "Help.", choices=(0, 3))


def test_replace_leaves_shares_what_does_not_change():
    root = Root()
    changed = replace_leaves(root, {"section.inner.epsilon": 0.5, "section.steps": 4, "name": "other"})
    assert changed == Root(name="other", section=Section(steps=4, inner=Inner(epsilon=0.5)))
    assert changed.second is root.second
    assert replace_leaves(root, {}) is root


@pytest.mark.parametrize("path", ["nothing", "section.nothing", "name.length"])
def test_replace_leaves_names_an_unknown_path(path):
    with pytest.raises(KeyError, match="has no leaf"):
        replace_leaves(Root(), {path: 1})
