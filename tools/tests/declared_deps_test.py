"""Holds that each Python file has one target, and that each import is a declared dependency of it."""

import collections
import graphlib
import importlib.metadata
import sys

from tools.tests import workspace

# Packages of an environment of the user's own, imported only within functions that say what to do without them.
_NOT_LOCKED = ("torch_tpu",)


def _root_files_targets():
    root = workspace.source_root()
    return root, workspace.python_files(root), workspace.read_targets(root)


def _lines(found):
    return "\n" + "\n".join(sorted(found))


def _shared(file):
    return file.endswith("/conftest.py")  # among the srcs of each test that it serves


def _undeclared(targets, files, imports):
    """Returns a line for each import that the importing file's target does not declare."""
    modules = workspace.Modules(files)
    owners = collections.defaultdict(list)
    for target in targets:
        for file in target.srcs:
            owners[file].append(target)
    distributions = importlib.metadata.packages_distributions()
    missing = []
    for imported in imports:
        for target in owners[imported.file]:
            top = imported.module.partition(".")[0]
            if top in ("titan", "tools"):
                found = modules.files_of(imported)
                if not found:
                    missing.append(f"{imported}: there is no such module")
                wanted = [{owner.label for owner in owners[file]} for file in found if file not in target.srcs]
            elif top in sys.stdlib_module_names or (top in _NOT_LOCKED and imported.deferred):
                continue
            elif top not in distributions:
                missing.append(f"{imported}: no locked package has it")
                continue
            else:
                names = {name.lower().replace("-", "_").replace(".", "_") for name in distributions[top]}
                wanted = [{f"@pypi//:{name}" for name in names}]
            declared = {*target.deps, *(["@pypi//:pytest"] if target.rule == "titan_test" else [])}
            missing += [
                f"{imported}: add {' or '.join(sorted(labels))} to the deps of {target.label}"
                for labels in wanted
                if not labels & declared
            ]
    return missing


def test_each_file_is_in_one_target():
    _, files, targets = _root_files_targets()
    owners = collections.Counter(file for target in targets for file in set(target.srcs))
    wrong = [f"{file}: in {owners[file]} targets" for file in files if owners[file] != 1 and not _shared(file)]
    wrong += [f"{file}: a target names it, but there is no such file" for file in set(owners) - set(files)]
    assert not wrong, _lines(wrong)


def test_each_import_is_a_declared_dep():
    root, files, targets = _root_files_targets()
    imports = [imported for file in files for imported in workspace.imports_of(file, (root / file).read_text())]
    missing = _undeclared(targets, files, imports)
    assert not missing, _lines(missing)


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
    text = "import os, absl.flags, torch\nfrom titan.x.b import f\ndef g():\n  from titan.x import c, b\n  import titan.x.d\n"
    assert _undeclared(targets, files, workspace.imports_of(files[0], text)) == [
        "titan/x/a.py:1: imports torch: add @pypi//:torch to the deps of //titan/x:a",
        "titan/x/a.py:4: imports titan.x: add //titan/x:c to the deps of //titan/x:a",
        "titan/x/a.py:5: imports titan.x.d: there is no such module",
    ]


def test_each_library_is_in_its_rooms_package():
    _, _, targets = _root_files_targets()
    by_label = {target.label: target for target in targets}
    for room in workspace.ROOMS:
        reached, waiting = set(), [f"//titan/{room}:package"]
        while waiting:
            label = waiting.pop()
            if label not in reached and label in by_label:
                reached.add(label)
                waiting += by_label[label].deps
        libraries = {
            target.label
            for target in targets
            if target.label.startswith((f"//titan/{room}:", f"//titan/{room}/"))
            and target.rule == "titan_library"
            and not target.testonly
        }
        missing = libraries - reached
        assert not missing, f"add to `libraries` in titan/{room}/BUILD.bazel:" + _lines(missing)
