"""Holds that every test has time to spare on a slow machine: Bazel's default of a minute is no test's limit."""

import pathlib
import re

import pytest

from tools.repository import workspace

_ROOT = workspace.source_root()
# As a mark, or among the cases of a grid of which every run takes some.
_MARKS = re.compile(r"mark\.exhaustive|testing\.grid import grid")
_SECONDS = {"short": 60, "moderate": 300, "long": 900, "eternal": 3600}


def _made(**attributes):
    """What titan_test passes to py_test: each target's attributes by its name."""
    made = {}

    def load(label, *names, **renamed):
        for name in (*names, *renamed):
            environment[name] = lambda **kwargs: made.update({kwargs["name"]: kwargs})

    def fail(message):
        raise ValueError(message)

    environment = {"load": load, "fail": fail, "Label": str}
    exec((_ROOT / "tools/build_defs/python.bzl").read_text(), environment)
    environment["titan_test"](**{"name": "a_test", "srcs": ["a_test.py"], **attributes})
    return made


@pytest.mark.parametrize(
    ("attributes", "timeout"),
    [
        ({}, "moderate"),
        ({"size": "small"}, "moderate"),
        ({"size": "medium"}, "long"),
        ({"size": "large"}, "long"),
        ({"size": "enormous"}, "eternal"),
        ({"size": "small", "timeout": "long"}, "long"),
    ],
)
def test_a_tests_timeout_follows_from_its_size_and_is_five_times_what_it_may_take(attributes, timeout):
    (target,) = _made(**attributes).values()
    assert target["timeout"] == timeout
    assert _SECONDS[timeout] >= 5 * (60 if attributes.get("size", "small") == "small" else 100)


def test_a_minute_is_refused():
    with pytest.raises(ValueError, match="a_test: timeout short is a minute"):
        _made(timeout="short")


def test_an_exhaustive_part_is_a_target_of_its_own_that_only_its_benchmark_runs():
    made = _made(exhaustive=True, tags=["cpu:2"])
    assert made["a_test"]["tags"] == ["cpu:2"]
    assert made["a_test_exhaustive"]["tags"] == ["cpu:2", "exhaustive", "manual"]
    assert made["a_test_exhaustive"]["args"][-2:] == ["-m", "exhaustive"]


def _test_targets():
    return [target for target in workspace.read_targets(_ROOT) if target.rule.endswith("_test")]


def test_every_test_is_a_titan_test():
    assert {target.rule for target in _test_targets()} == {"titan_test"}


def test_files_with_an_exhaustive_part_have_a_target_for_it():
    marked = {
        str(path.relative_to(_ROOT))
        for top in ("titan", "tools")
        for path in (_ROOT / top).rglob("*_test.py")
        if path.name != pathlib.Path(__file__).name and _MARKS.search(path.read_text())
    }
    assert marked == {src for target in _test_targets() if target.exhaustive for src in target.srcs if src in marked}
    assert all(marked.intersection(target.srcs) for target in _test_targets() if target.exhaustive)
