"""Holds the table of rooms: which may import which, and what stays out of a module's import."""

import pytest

from tools.repository import workspace

# Room -> what it may import of titan besides itself: prefixes of dotted names.
_EDGES = {
    "core": (),
    "parallel": (),
    "kernels": (),
    "models": ("titan.core.config", "titan.core.init", "titan.parallel.parallel_plan"),
    "float8": ("titan.core.config", "titan.models.layers"),
    "graph": (
        "titan.core.config",
        "titan.core.hardware",
        "titan.parallel.axis_index",
        "titan.parallel.layout",
        "titan.parallel.mesh",
        "titan.kernels.jax_op",
        "titan.kernels.target",
    ),
    "train": tuple(f"titan.{room}" for room in workspace.ROOMS),
}

# Room -> third-party packages that it must not import at all, or not when its modules are imported.
_NEVER = {"parallel": ("jax", "jaxlib", "torchax"), "models": ("jax", "jaxlib"), "float8": ("jax", "jaxlib")}
_DEFERRED_ONLY = {"core": ("torch", "jax", "jaxlib")}


def _imports():
    root = workspace.source_root()
    for file in workspace.python_files(root):
        yield from workspace.imports_of(file, (root / file).read_text())


def _room(file):
    parts = file.split("/")
    return parts[1] if parts[0] == "titan" and len(parts) > 2 else None


def _is_in(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _forbidden(imported):
    """Returns why an import breaks the table, or None."""
    room = _room(imported.file)
    if room is None or workspace.is_test(imported.file):
        return None
    names = imported.names if imported.module in ("titan", *(f"titan.{other}" for other in workspace.ROOMS)) else ()
    for name in names or (imported.module,):
        if _is_in(name, ("titan",)):
            if not _is_in(name, (f"titan.{room}", *_EDGES[room])) and name not in ("titan", "titan.moved"):
                return f"{imported}: titan/{room} may import {', '.join(_EDGES[room]) or 'no other room'}, not {name}"
        elif _is_in(name, ("tools",)):
            return f"{imported}: titan imports nothing of tools"
        elif _is_in(name, _NEVER.get(room, ())):
            return f"{imported}: titan/{room} does without it"
        elif not imported.deferred and _is_in(name, _DEFERRED_ONLY.get(room, ())):
            return f"{imported}: titan/{room} imports it within functions only"
    return None


def test_every_room_keeps_to_its_edges():
    rooms = {_room(file) for file in workspace.python_files(workspace.source_root())} - {None}
    assert rooms == set(workspace.ROOMS)
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
