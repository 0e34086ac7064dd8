"""Holds that each room's changelog begins with the version that its BUILD file gives it."""

import re

import pytest

from tools.repository import workspace


@pytest.mark.parametrize("room", workspace.ROOMS)
def test_the_newest_entry_is_of_the_rooms_version(room):
    folder = workspace.source_root() / "titan" / room
    versions = re.findall(r'^    version = "(.+)",$', (folder / "BUILD.bazel").read_text(), re.MULTILINE)
    entries = re.findall(r"^## (.+)$", (folder / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[:1] == versions
