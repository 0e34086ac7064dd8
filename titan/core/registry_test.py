"""The registry: entries by name, imported when they are used, and what is said of names that are not there."""

import pathlib

import pytest

from titan.core.registry import Registry, RegistryError


def test_an_entry_is_found_by_name_in_the_order_of_registration():
    registry = Registry("number")
    registry.register("two", 2)
    registry.register("one", 1)
    assert list(registry) == ["two", "one"]
    assert dict(registry.items()) == {"two": 2, "one": 1}
    assert "one" in registry and "three" not in registry and len(registry) == 2


def test_a_dotted_entry_is_imported_when_it_is_used():
    registry = Registry("class")
    registry.register("path", "pathlib:PurePosixPath")
    registry.register("missing", "no_such_package.module:Thing")
    assert registry["path"] is pathlib.PurePosixPath
    registry.register("path", "pathlib:PurePosixPath")  # as before
    with pytest.raises(RegistryError, match="class 'missing' cannot be loaded from 'no_such_package.module:Thing'"):
        registry["missing"]


def test_a_name_is_taken_once():
    registry = Registry("number")
    registry.register("one", 1)
    registry.register("one", 1)  # a module imported under two names registers twice
    with pytest.raises(RegistryError, match="two number entries 'one': 1 and 2"):
        registry.register("one", 2)


def test_an_unknown_name_is_answered_with_the_nearest():
    registry = Registry("optimizer")
    registry.register("adamw", 1)
    with pytest.raises(RegistryError, match="no optimizer 'adam'; did you mean 'adamw'\\? registered: adamw"):
        registry["adam"]
