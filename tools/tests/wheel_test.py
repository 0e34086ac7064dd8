"""The wheels of the packages: contents, metadata, and a plugin that trains and compiles with them installed."""

import email
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tools.repository import workspace

_RUNFILES = pathlib.Path.cwd()  # where Bazel starts a test, and where the wheels lie


def _wheel(package):
    folder = _RUNFILES / "titan" if package == "base" else _RUNFILES / "titan" / package
    (wheel,) = folder.glob(f"titan_{package}-*-py3-none-any.whl")
    return wheel


def _metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.mark.parametrize("package", workspace.PACKAGES)
def test_wheel_holds_the_packages_files_and_no_tests(package):
    source = workspace.source_root()
    expected = {
        file
        for file in workspace.python_files(source)
        if file.startswith(f"titan/{package}/") and not workspace.is_test(file)
    }
    with zipfile.ZipFile(_wheel(package)) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    testonly = {file for target in workspace.read_targets(source) if target.testonly for file in target.srcs}
    binaries = {
        file for target in workspace.read_targets(source) if target.rule == "titan_binary" for file in target.srcs
    }
    assert {name for name in names if name.endswith(".py")} == expected - testonly - binaries


def test_wheel_requires_what_its_package_depends_on():
    metadata = _metadata(_wheel("parallel"))
    assert metadata["Name"] == "titan-parallel"
    requires = metadata.get_all("Requires-Dist")
    assert [re.split(r"[><=~]", requirement)[0] for requirement in requires] == ["titan-base", "torch"]
    models = _metadata(_wheel("models")).get_all("Requires-Dist")
    assert [requirement for requirement in models if requirement.startswith("titan-core~=")]


def test_metadata_say_what_a_wheel_is_and_its_license():
    for package in workspace.PACKAGES:
        metadata = _metadata(_wheel(package))
        assert metadata["Summary"] and metadata["License-Expression"] == "Apache-2.0"
        with zipfile.ZipFile(_wheel(package)) as archive:
            (license_,) = [name for name in archive.namelist() if name.endswith("dist-info/licenses/LICENSE")]
            assert archive.read(license_) == (workspace.source_root() / "LICENSE").read_bytes()


def test_packages_whose_private_names_are_used_are_required_at_their_version():
    requirements = {
        line for package in workspace.PACKAGES for line in _metadata(_wheel(package)).get_all("Requires-Dist", ())
    }
    assert {re.split(r"[><=~]", line)[0] for line in requirements if "==" in line} >= {"jax", "torch", "tokamax"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """All wheels and the plugin of `examples/extension` in a folder; the variables with which Python finds them."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("the environment in use has no pip")
    target = tmp_path_factory.mktemp("installed")
    links = tmp_path_factory.mktemp("links")
    for package in ("base", *workspace.PACKAGES):
        shutil.copy(_wheel(package), links)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    names = [f"titan-{package}" for package in ("base", *workspace.PACKAGES)]
    subprocess.run([*pip, "--no-index", "--no-deps", f"--find-links={links}", f"--target={target}", *names], check=True)
    example = workspace.source_root() / "examples" / "extension"
    shutil.copytree(example / "leaky", target / "leaky")
    # As pip would write it out of the example's pyproject.toml, which needs a build backend.
    info = target / "leaky-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leaky\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[titan.plugins]\nleaky = leaky.titan_plugin\n")
    assert 'leaky = "leaky.titan_plugin"' in (example / "pyproject.toml").read_text()
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    return {**kept, "PYTHONPATH": str(target), "JAX_PLATFORMS": "cpu"}


def _titan_train(env: dict[str, str], *flags: str) -> subprocess.CompletedProcess:
    script = pathlib.Path(env["PYTHONPATH"]) / "bin" / "titan-train"
    assert script.is_file()
    return subprocess.run(
        [sys.executable, "-P", script, "leaky_debug", *flags],
        env=env,
        cwd=env["PYTHONPATH"],
        capture_output=True,
        text=True,
    )


_SMALL = (
    "--model.num_layers=1",
    "--model.vocab_size=300",
    "--tokenizer.vocab_size=300",
    "--training.sequence_length=64",
)


def test_a_plugin_of_an_installed_wheel_trains_with_the_console_script(installed, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The square of {number} is {number**2}." for number in range(2000)))
    folders = [f"--{section}_folder={tmp_path / section}" for section in ("data.cache", "tokenizer.cache")]
    flags = (f"--data.path={text}", f"--checkpoint.folder={tmp_path / 'run'}", "--compile.cache_folder=", *folders)
    ended = _titan_train(installed, *_SMALL, *flags, "--training.steps=3", "--training.validation_interval=0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "plugins: leaky.titan_plugin" in ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["last_loss"] < summary["first_loss"]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["_type"] == "LeakyConfig"


def test_it_compiles_for_a_slice_in_its_variant(installed, tmp_path):
    flags = ("--aot", "--hardware=v6e-2x4", f"--aot.report={tmp_path / 'report.json'}")
    ended = _titan_train(installed, *_SMALL, *flags)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["hardware"] == "v6e-2x4" and report["batch_size"] == 64
    assert report["compute"]["kernels"]["squared_relu"] >= 1  # the variant's flag
