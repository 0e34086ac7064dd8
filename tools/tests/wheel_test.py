"""Builds on the wheels of the rooms: their contents, their metadata, and one installed with pip."""

import email
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

from tools.repository import workspace

_RUNFILES = pathlib.Path.cwd()  # where Bazel starts a test, and where the wheels lie


def _wheel(room):
    folder = _RUNFILES / "titan" if room == "base" else _RUNFILES / "titan" / room
    (wheel,) = folder.glob(f"titan_{room}-*-py3-none-any.whl")
    return wheel


def _metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.mark.parametrize("room", workspace.ROOMS)
def test_wheel_holds_the_rooms_files_and_no_tests(room):
    source = workspace.source_root()
    expected = {
        file
        for file in workspace.python_files(source)
        if file.startswith(f"titan/{room}/") and not workspace.is_test(file)
    }
    with zipfile.ZipFile(_wheel(room)) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    testonly = {file for target in workspace.read_targets(source) if target.testonly for file in target.srcs}
    binaries = {
        file for target in workspace.read_targets(source) if target.rule == "titan_binary" for file in target.srcs
    }
    assert {name for name in names if name.endswith(".py")} == expected - testonly - binaries


def test_wheel_requires_what_its_room_depends_on():
    metadata = _metadata(_wheel("parallel"))
    assert metadata["Name"] == "titan-parallel"
    requires = metadata.get_all("Requires-Dist")
    assert [re.split(r"[><=~]", requirement)[0] for requirement in requires] == ["titan-base", "torch"]
    models = _metadata(_wheel("models")).get_all("Requires-Dist")
    assert [requirement for requirement in models if requirement.startswith("titan-core~=")]


def test_wheel_installs_and_imports(tmp_path):
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("the environment in use has no pip")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--disable-pip-version-check",
            f"--target={tmp_path}",
            _wheel("base"),
            _wheel("core"),
        ],
        check=True,
    )
    program = (
        "import importlib.metadata, titan.core.config.tree as tree; "
        "print(tree.__file__, importlib.metadata.version('titan-core'))"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    file, version = result.stdout.split()
    assert file == str(tmp_path / "titan/core/config/tree.py")
    assert version == _metadata(_wheel("core"))["Version"]
