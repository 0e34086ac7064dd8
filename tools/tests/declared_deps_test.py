"""Holds that each Python file has one target, and that each import is a declared dependency of it."""

import collections
import graphlib

from tools.repository import workspace
from tools.repository.declared_deps import undeclared_imports


def _root_files_targets():
    root = workspace.source_root()
    return root, workspace.python_files(root), workspace.read_targets(root)


def _lines(found):
    return "\n" + "\n".join(sorted(found))


def _shared(file):
    return file.endswith("/conftest.py")  # among the srcs of each test that it serves


def test_each_file_is_in_one_target():
    _, files, targets = _root_files_targets()
    owners = collections.Counter(file for target in targets for file in set(target.srcs))
    wrong = [f"{file}: in {owners[file]} targets" for file in files if owners[file] != 1 and not _shared(file)]
    wrong += [f"{file}: a target names it, but there is no such file" for file in set(owners) - set(files)]
    assert not wrong, _lines(wrong)


def test_each_import_is_a_declared_dep():
    root, files, targets = _root_files_targets()
    imports = [imported for file in files for imported in workspace.imports_of(file, (root / file).read_text())]
    missing = [str(found) for found in undeclared_imports(targets, files, imports)]
    assert not missing, "./bazelw run //tools:fix_deps writes what can be written:" + _lines(missing)


def test_no_target_depends_on_itself():
    _, _, targets = _root_files_targets()
    graphlib.TopologicalSorter({target.label: target.deps for target in targets}).prepare()  # or a CycleError


def test_an_undeclared_import_is_found(tmp_path):
    build = """
load("//tools/build_defs:python.bzl", "titan_library")
SRCS = ["%s.py" % name for name in ["a"]]
titan_library(name = "a", srcs = SRCS, deps = [":b"] + ["@pypi//:absl_py"])
titan_library(name = "b", srcs = ["b.py"])
titan_library(name = "c", srcs = ["c.py"])
"""
    targets = workspace.parse_build_file(build, "titan/x", tmp_path)
    files = ["titan/x/a.py", "titan/x/b.py", "titan/x/c.py"]
    text = "import os, absl.flags, torch\nfrom titan.x.b import f\n"
    text += "def g():\n  from titan.x import c, b\n  import titan.x.d\n"
    found = undeclared_imports(targets, files, workspace.imports_of(files[0], text))
    assert [str(undeclared) for undeclared in found] == [
        "titan/x/a.py:1: imports torch: add @pypi//:torch to the deps of //titan/x:a",
        "titan/x/a.py:4: imports titan.x: add //titan/x:c to the deps of //titan/x:a",
        "titan/x/a.py:5: imports titan.x.d: there is no such module",
    ]


def test_each_library_is_in_its_packages_package():
    _, _, targets = _root_files_targets()
    by_label = {target.label: target for target in targets}
    for package in workspace.PACKAGES:
        reached, waiting = set(), [f"//titan/{package}:package"]
        while waiting:
            label = waiting.pop()
            if label not in reached and label in by_label:
                reached.add(label)
                waiting += by_label[label].deps
        libraries = {
            target.label
            for target in targets
            if target.label.startswith((f"//titan/{package}:", f"//titan/{package}/"))
            and target.rule == "titan_library"
            and not target.testonly
        }
        missing = libraries - reached
        assert not missing, f"add to `libraries` in titan/{package}/BUILD.bazel:" + _lines(missing)
