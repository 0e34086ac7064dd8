"""Each package's changelog begins with the version that its BUILD file gives it, and says what each brought."""

import re

import pytest

from tools.repository import workspace


def _changelog(package: str) -> dict[str, list[str]]:
    """The entries of each version, newest first."""
    text = (workspace.source_root() / "titan" / package / "CHANGELOG.md").read_text()
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    versions, sections = parts[::2], parts[1::2]
    assert len(set(versions)) == len(versions)
    return {
        version: re.findall(r"^- (.+)$", section, re.MULTILINE)
        for version, section in zip(versions, sections, strict=True)
    }


@pytest.mark.parametrize("package", workspace.PACKAGES)
def test_the_newest_entry_is_of_the_packages_version(package):
    build_file = workspace.source_root() / "titan" / package / "BUILD.bazel"
    versions = re.findall(r'^    version = "(.+)",$', build_file.read_text(), re.MULTILINE)
    assert list(_changelog(package))[:1] == versions


@pytest.mark.parametrize("package", workspace.PACKAGES)
def test_versions_go_down_and_each_says_something_once(package):
    changelog = _changelog(package)
    numbers = [tuple(map(int, version.split("."))) for version in changelog]
    assert numbers == sorted(numbers, reverse=True)
    assert all(changelog.values())
    entries = [entry for section in changelog.values() for entry in section]
    assert len(set(entries)) == len(entries)
