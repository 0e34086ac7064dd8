"""Old names of modules and of what modules held: each leads to something that is there, with a warning."""

import ast
import importlib
import subprocess
import sys

import pytest

from titan import moved
from tools.repository import workspace

_ROOT = workspace.source_root()


def _path(module):
    return _ROOT.joinpath(*module.split(".")).with_suffix(".py")


@pytest.mark.parametrize(("old", "new"), moved._MODULES.items())
def test_an_old_module_is_gone_and_the_new_one_there(old, new):
    assert not _path(old).exists() and not _path(old).with_suffix("").is_dir()
    assert _path(new).is_file()


@pytest.mark.parametrize(("package", "new", "names"), [(old, *entry) for old, entry in moved._NAMES.items()])
def test_what_a_module_held_is_in_the_new_one(package, new, names):
    assert _path(package).with_suffix("").is_dir()
    bound = {
        name
        for node in ast.walk(ast.parse(_path(new).read_text(encoding="utf-8")))
        for name in (
            [node.name]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
            else [alias.asname or alias.name for alias in node.names]
            if isinstance(node, (ast.Import, ast.ImportFrom))
            else [node.id]
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            else []
        )
    }
    assert set(names) <= bound


def _warnings_of(statement):
    code = f"import warnings; warnings.simplefilter('always'); {statement}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_importing_an_old_module_gives_the_new_one_and_a_warning():
    told = _warnings_of(
        "import titan.parallel.torus as old, titan.parallel.tpu_topology.torus as new; assert old is new"
    )
    assert "titan.parallel.torus is now titan.parallel.tpu_topology.torus; the old name goes away" in told


def test_a_module_that_is_a_package_now_still_gives_its_names():
    package, (new, names) = next(iter(moved._NAMES.items()))
    told = _warnings_of(f"from {package} import {names[0]}")
    assert f"{package}.{names[0]} is now {new}.{names[0]}" in told


def test_other_names_are_errors():
    package = importlib.import_module("titan.train.step")
    with pytest.raises(AttributeError, match="module 'titan.train.step' has no attribute 'no_such_name'"):
        package.no_such_name  # noqa: B018 (it is looked up)
    unknown = "titan.graph.no_such_module"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(unknown)
