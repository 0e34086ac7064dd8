"""Holds that a part of titan can be used without the packages that it has no need of."""

import pathlib
import pkgutil
import subprocess
import sys

import pytest

import titan

# A name set to None in sys.modules cannot be imported.
_PROGRAM = """
import importlib, sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def _import(modules, *, without):
    return subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM, ",".join(without), *modules], capture_output=True, text=True, timeout=300
    )


def _modules_of(package):
    folder = pathlib.Path(titan.__file__).parent / package
    names = [module.name for module in pkgutil.walk_packages([str(folder)], f"titan.{package}.")]
    return [name for name in names if not name.endswith(("_test", "conftest"))]


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        pytest.param(_modules_of("parallel"), ["jax", "jaxlib"], id="parallel without jax"),
        pytest.param(_modules_of("core"), ["jax", "jaxlib", "torch", "transformers"], id="core without jax and torch"),
        pytest.param(
            ["titan.parallel.tpu_topology.topology_svg", "titan.parallel.tpu_topology.topology_text"],
            ["jax", "jaxlib", "torch", "numpy"],
            id="topology without any package",
        ),
        pytest.param(
            ["titan.train.config.run", "titan.models.llama3.config"],
            ["jax", "jaxlib", "torch", "transformers"],
            id="config tree without jax and torch",
        ),
    ],
)
def test_imports_without(modules, without):
    assert modules
    result = _import(modules, without=without)
    assert result.returncode == 0, result.stderr


def test_a_missing_package_is_noticed():
    assert "import of torch halted" in _import(["torch"], without=["torch"]).stderr
