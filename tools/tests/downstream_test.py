"""Builds and tests a second workspace: one that uses single targets of titan, and `examples/extension`."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tools.repository import workspace

_FILES = {
    ".bazelrc": """\
startup --host_jvm_args=-Xmx512m
build --nosandbox_debug
""",
    # Bazel 4 would make a titan/__init__.py of its own; titan's macros see to it themselves.
    "app/BUILD.bazel": """\
load("@rules_python//python:defs.bzl", "py_test")
load("@titan//tools/build_defs:python.bzl", "titan_test")

py_test(
    name = "plain_test",
    srcs = ["plain_test.py"],
    legacy_create_init = 0,
    deps = ["@titan//titan/parallel:simple_fsdp"],
)

titan_test(
    name = "pytest_test",
    srcs = ["pytest_test.py"],
    deps = ["@titan//titan/parallel:simple_fsdp"],
)

py_test(
    name = "kernel_test",
    srcs = ["kernel_test.py"],
    legacy_create_init = 0,
    deps = ["@titan//titan/kernels/splash_attention:api"],
)
""",
    # Nothing else of titan may come along.
    "app/plain_test.py": """\
import importlib.util

import titan.parallel.simple_fsdp

assert titan.parallel.simple_fsdp.__file__
assert importlib.util.find_spec("titan.core") is None
assert importlib.util.find_spec("titan.train") is None
""",
    "app/kernel_test.py": """\
import importlib.util

import torch

from titan.kernels.splash_attention.api import splash_attention

q, k, v = torch.randn(3, 1, 2, 40, 16, requires_grad=True).unbind()
out = splash_attention(q, k, v, causal=True, scale=0.25)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
for found in ("titan.core", "titan.graph", "titan.parallel", "titan.kernels.grouped_matmul"):
    assert importlib.util.find_spec(found) is None, found
""",
    "app/pytest_test.py": """\
from titan.parallel import simple_fsdp


def test_public_names():
    assert [name for name in vars(simple_fsdp) if not name.startswith("_")]
""",
}


def _bazel():
    bazel = os.environ.get("BAZEL") or shutil.which("bazelisk") or shutil.which("bazel")
    if not bazel:
        pytest.skip("no Bazel on the PATH of tests; run them through bazelw, which names it")
    return bazel


@pytest.fixture
def app(tmp_path):
    """A workspace, and a function that runs Bazel in it with an output base of its own."""
    folder = tmp_path / "app"
    shutil.copytree(workspace.source_root() / "examples" / "extension", folder)
    for name in ("WORKSPACE", "MODULE.bazel"):
        text = (folder / name).read_text()
        assert text.count('path = "../.."') == 1
        (folder / name).write_text(text.replace("../..", str(workspace.source_root())))
    for name, text in _FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    bazel = _bazel()
    # The packages that this test runs on are used as they are: nothing is installed.
    # Bazel takes TEST_TMPDIR and the variables of runfiles for its own when nested.
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "JAVA_HOME")}
    env = {**kept, "TITAN_PYTHON": sys.executable, "TITAN_USE_ENVIRONMENT": "1"}

    def run(*args):
        return subprocess.run(
            [bazel, f"--output_user_root={tmp_path / 'user'}", f"--output_base={tmp_path / 'base'}", *args],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
        )

    yield run
    run("shutdown")
    # Bazel makes folders that cannot be written, which pytest could not remove.
    subprocess.run(["chmod", "-R", "u+w", pathlib.Path(tmp_path)], check=False)


def test_single_targets_and_a_family_op_kernel_pass_and_recipe_from_outside(app):
    result = app(
        "test",
        "--jobs=1",
        "--test_output=errors",
        "--test_env=OMP_NUM_THREADS=1",
        "--test_env=JAX_PLATFORMS=cpu",
        "//...",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 tests pass" in result.stdout + result.stderr
