"""Holds the table of packages: which may import which, and what stays out of a module's import."""

import collections
import graphlib

import pytest

from tools.repository import workspace

# Package -> what it may import of titan besides itself: prefixes of dotted names.
_EDGES = {
    "core": (),
    "parallel": (),
    "kernels": (),
    "models": ("titan.core.config", "titan.core.init", "titan.core.registry", "titan.parallel.parallel_plan"),
    "float8": ("titan.core.config", "titan.models.layers"),
    "graph": (
        "titan.core.config",
        "titan.core.hardware",
        "titan.core.progress",
        "titan.core.registry",
        "titan.parallel.axis_index",
        "titan.parallel.layout",
        "titan.parallel.mesh",
        "titan.kernels.jax_op",
        "titan.kernels.target",
    ),
    "train": tuple(f"titan.{package}" for package in workspace.PACKAGES),
}

# Package -> third-party packages that it must not import at all, or not when its modules are imported.
_NEVER = {"parallel": ("jax", "jaxlib", "torchax"), "models": ("jax", "jaxlib"), "float8": ("jax", "jaxlib")}
_DEFERRED_ONLY = {"core": ("torch", "jax", "jaxlib")}


def _imports():
    root = workspace.source_root()
    for file in workspace.python_files(root):
        yield from workspace.imports_of(file, (root / file).read_text())


def _package(file):
    parts = file.split("/")
    return parts[1] if parts[0] == "titan" and len(parts) > 2 else None


def _is_in(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _forbidden(imported):
    """Returns why an import breaks the table, or None."""
    package = _package(imported.file)
    if package is None or workspace.is_test(imported.file):
        return None
    names = imported.names if imported.module in ("titan", *(f"titan.{other}" for other in workspace.PACKAGES)) else ()
    for name in names or (imported.module,):
        if _is_in(name, ("titan",)):
            if not _is_in(name, (f"titan.{package}", *_EDGES[package])) and name not in ("titan", "titan.moved"):
                allowed = ", ".join(_EDGES[package]) or "no other package"
                return f"{imported}: titan/{package} may import {allowed}, not {name}"
        elif _is_in(name, ("tools",)):
            return f"{imported}: titan imports nothing of tools"
        elif _is_in(name, _NEVER.get(package, ())):
            return f"{imported}: titan/{package} does without it"
        elif not imported.deferred and _is_in(name, _DEFERRED_ONLY.get(package, ())):
            return f"{imported}: titan/{package} imports it within functions only"
    return None


def test_every_package_keeps_to_its_edges():
    packages = {_package(file) for file in workspace.python_files(workspace.source_root())} - {None}
    assert packages == set(workspace.PACKAGES)
    reasons = [reason for reason in map(_forbidden, _imports()) if reason]
    assert not reasons, "\n" + "\n".join(reasons)


@pytest.mark.parametrize(
    ("file", "text", "is_forbidden"),
    [
        ("titan/core/a.py", "from titan.parallel import mesh", True),
        ("titan/core/a.py", "import torch", True),
        ("titan/core/a.py", "def f():\n  import torch", False),
        ("titan/core/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import jax", False),
        ("titan/parallel/a.py", "def f():\n  import jax.numpy", True),
        ("titan/kernels/a.py", "from titan.core import init", True),
        ("titan/models/a.py", "from titan.core import init", False),
        ("titan/models/a.py", "from titan import train", True),
        ("titan/models/a.py", "from titan.parallel import tensor_parallel", True),
        ("titan/models/a.py", "from titan.parallel.parallel_plan import Split", False),
        ("titan/models/a.py", "import titan.core.data", True),
        ("titan/models/llama3/a.py", "from . import model", False),
        ("titan/models/llama3/a.py", "from ...train import build", True),
        ("titan/graph/a.py", "from titan.parallel.mesh import build_mesh", False),
        ("titan/graph/a.py", "from titan.parallel import simple_fsdp", True),
        ("titan/graph/a.py", "import importlib\nimportlib.import_module('titan.models.llama3')", True),
        ("titan/graph/a_test.py", "from titan.train import build", False),
        ("titan/train/a.py", "from titan.models.llama3 import config", False),
    ],
)
def test_the_table_judges_an_import(file, text, is_forbidden):
    reasons = [_forbidden(imported) for imported in workspace.imports_of(file, text)]
    assert any(reasons) == is_forbidden


# Within a package: folder -> the folders of it whose files it may import; "." is the package's own files. A folder
# imports only what stands above it in the table.
_INNER_EDGES = {
    "graph": {
        "ir": (),
        "capture": ("ir",),
        "lowering": ("ir",),
        "passes": ("ir",),
        "executors": ("ir", "lowering"),
        "split": ("ir", "lowering", "passes", "executors"),
        "aot": ("ir", "split"),
        "torch_tpu": ("ir", "lowering"),
    },
    "train": {
        "optimizers": (),
        "config": ("optimizers",),
        "sharding": ("config",),
        "step": ("optimizers", "config", "sharding"),
        "swaps": ("config", "sharding"),
        "runtime": ("config", "sharding", "step", "swaps"),
        "images": ("config", "sharding", "step", "runtime"),
        "inputs": ("config", "images"),
        "loop": ("config", "sharding", "step", "runtime", "inputs"),
        ".": (
            "config",
            "optimizers",
            "sharding",
            "step",
            "swaps",
            "runtime",
            "images",
            "inputs",
            "loop",
            "aot",
            "recipes",
        ),
        "aot": (".", "config", "step", "runtime"),  # the report on a run that `build` puts together
        "recipes": (".", "config"),  # each is a program: it starts `main`
    },
}
_MOST_FILES = 20


def _product_files():
    return [
        file
        for file in workspace.python_files(workspace.source_root())
        if file.startswith("titan/") and not workspace.is_test(file) and "_for_test" not in file
    ]


def _file_edges(*, deferred):
    """(file, imported file) for the imports of titan's product files, with or without those within functions."""
    root, modules = workspace.source_root(), workspace.Modules(_product_files())
    for file in _product_files():
        for imported in workspace.imports_of(file, (root / file).read_text()):
            if imported.module.partition(".")[0] == "titan" and (deferred or not imported.deferred):
                yield from ((file, other) for other in modules.files_of(imported) if other != file)


def _folder(file, package):
    below = file.removeprefix(f"titan/{package}/").split("/")
    return below[0] if len(below) > 1 else "."


@pytest.mark.parametrize("package", _INNER_EDGES)
def test_folders_within_a_package_keep_to_their_edges(package):
    allowed = _INNER_EDGES[package]
    beginning = f"titan/{package}/"
    found = {
        (_folder(file, package), _folder(other, package)): f"{file} imports {other}"
        for file, other in _file_edges(deferred=True)
        if file.startswith(beginning)
        and other.startswith(beginning)
        and not other.endswith(("__init__.py", "_compat.py"))
    }
    wrong = [text for (own, other), text in found.items() if own != other and other not in allowed.get(own, ())]
    assert not wrong, "\n" + "\n".join(wrong)
    unused = {(own, other) for own, others in allowed.items() for other in others} - found.keys()
    assert not unused, "take these out of the table"
    order = list(allowed)
    entries = (".", "aot", "recipes")  # programs, which may call one another
    assert all(
        order.index(other) < order.index(own) or {own, other} <= set(entries)
        for own, others in allowed.items()
        for other in others
    )


def test_there_is_no_circle_of_imports_between_files():
    # Imports within functions are left out: a configuration loads, by name or within a method, what reads it.
    graph = {}
    for file, other in _file_edges(deferred=False):
        graph.setdefault(file, set()).add(other)
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle


def test_no_folder_is_a_drawer():
    folders = collections.Counter(
        file.rpartition("/")[0] for file in _product_files() if not file.endswith("__init__.py")
    )
    assert {folder: number for folder, number in folders.items() if number > _MOST_FILES} == {}
