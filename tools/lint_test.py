"""Every Python file is as ruff formats it, and breaks none of the rules of pyproject.toml."""

import subprocess

import pytest

from tools.lint import ruff_commands
from tools.repository import workspace


@pytest.mark.parametrize("command", ruff_commands(check=True), ids=["rules", "format"])
def test_ruff_has_nothing_to_say(command):
    ended = subprocess.run(command, cwd=workspace.source_root(), capture_output=True, text=True)
    assert ended.returncode == 0, f"./bazelw run //tools:lint mends most of it\n{ended.stdout}{ended.stderr}"
