"""Both locks have the packages that titan names, and the one for later Pythons has none that is older."""

import re

from tools.repository import workspace

_LOCKED = re.compile(r"^([\w.-]+)(?:\[[^]]*\])?==(\d[\w.]*)", re.MULTILINE)
_NAMED = re.compile(r"^([\w.-]+)", re.MULTILINE)


def _folder(name):
    return workspace.source_root() / "third_party" / name


def _locked(name):
    return dict(_LOCKED.findall((_folder(name) / "requirements_lock.txt").read_text()))


def _numbers(version):
    return [int(number) for number in re.findall(r"\d+", version)]


def test_both_locks_are_of_the_same_packages():
    named = [_NAMED.findall((_folder(name) / "requirements.in").read_text()) for name in ("pypi", "pypi_312")]
    assert named[0] == named[1]
    for name in ("pypi", "pypi_312"):
        assert {package.lower().replace("_", "-") for package in named[0]} <= set(_locked(name))


def test_the_later_lock_has_no_older_version():
    earlier, later = _locked("pypi"), _locked("pypi_312")
    older = [name for name in earlier.keys() & later.keys() if _numbers(later[name]) < _numbers(earlier[name])]
    assert older == []
    assert _numbers(later["jax"]) > _numbers(earlier["jax"])
