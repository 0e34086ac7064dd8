"""The Python rules that every BUILD file of titan loads.

titan_library: one target per file.
titan_binary: a program, run as a module in the folder that `bazel run` was called from.
titan_test: pytest.
titan_package: a package's `__init__.py`, its version and its wheel.
titan_moved: labels that targets had before, for a version.
"""

load(
    "@rules_python//python:defs.bzl",
    _py_binary = "py_binary",
    _py_library = "py_library",
    _py_test = "py_test",
)
load("//tools/build_defs:launcher.bzl", "launcher")
load("//tools/build_defs:wheel.bzl", "wheel")

def titan_library(name, **kwargs):
    """A py_library.

    Args:
      name: the target's name, by custom that of its file.
      **kwargs: py_library's attributes.
    """
    _py_library(name = name, **kwargs)

def titan_binary(name, main = None, module = None, srcs = [], deps = [], **kwargs):
    """A program, started as `python -m` would start it.

    It runs as the module it is, so that its folder is not on the import path and
    child processes can import it. Under `bazel run` it works in the folder the
    user called from (BUILD_WORKING_DIRECTORY), so relative paths on the command
    line mean what they say.

    Args:
      name: the target's name.
      main: the file among srcs to run; not needed where srcs is one file.
      module: instead of main, the dotted name of a module among the deps, for
        several binaries that share one main and differ in `args`.
      srcs: Python files of the binary itself.
      deps: what it imports.
      **kwargs: py_binary's other attributes (args, data, env, testonly, visibility, ...).
    """
    if not module:
        if not main and len(srcs) == 1:
            main = srcs[0]
        if not main or main not in srcs:
            fail("titan_binary %s: name a file among srcs as main, or a module among deps as module" % name)
        module = ".".join([part for part in native.package_name().split("/") if part] + [main[:-len(".py")]])
    launcher_name = name + "_launcher"
    launcher(
        name = launcher_name,
        module = module,
        tags = ["manual"],
        testonly = kwargs.get("testonly", False),
        visibility = ["//visibility:private"],
    )
    _py_binary(
        name = name,
        srcs = srcs + [launcher_name],
        main = launcher_name + ".py",
        legacy_create_init = 0,
        deps = deps,
        **kwargs
    )

# A test's time limit by its size. On a fast machine no test takes more than 100 seconds, nor a small one more than 60,
# which tools/ci/summary.py prints: a machine five times as slow has time to spare. Bazel's own limit of a small test is
# a minute.
_TIMEOUTS = {
    "small": "moderate",
    "medium": "long",
    "large": "long",
    "enormous": "eternal",
}

def titan_test(name, srcs, deps = [], data = [], args = [], size = "small", timeout = None, exhaustive = False, **kwargs):
    """A py_test that runs pytest over its srcs.

    Args:
      name: the target's name.
      srcs: test files; a conftest.py among them is loaded but not collected.
      deps: what the tests import; pytest itself is added where it is missing.
      data: files the tests read.
      args: more pytest arguments.
      size: as in Bazel: what the test is expected to need, which its timeout follows from.
      timeout: instead of that of the size, as in Bazel; "short", which is a minute, is refused.
      exhaustive: whether tests or parameters in srcs are marked `pytest.mark.exhaustive`. The target leaves them out,
        and `<name>_exhaustive`, which only //tools/bench:exhaustive runs, consists of them.
      **kwargs: py_test's other attributes (shard_count, env, tags, ...).
    """
    if timeout == "short":
        fail("titan_test %s: timeout short is a minute, which a slow machine needs to start; give moderate" % name)
    main = Label("//tools/python:pytest_main.py")
    tests = [src for src in srcs if not src.endswith("conftest.py")]
    attributes = dict(
        kwargs,
        srcs = srcs + [main],
        main = main,
        data = data + [Label("//:pytest.ini")],
        legacy_create_init = 0,
        deps = deps + ([] if "@pypi//:pytest" in deps else [Label("@pypi//:pytest")]),
    )
    paths = ["$(rootpath %s)" % test for test in tests]
    _py_test(
        name = name,
        size = size,
        timeout = timeout or _TIMEOUTS[size],
        args = paths + args,
        **attributes
    )
    if exhaustive:
        attributes["tags"] = attributes.get("tags", []) + ["exhaustive", "manual"]
        _py_test(
            name = name + "_exhaustive",
            size = size,
            timeout = "eternal",
            args = paths + args + ["-m", "exhaustive"],
            **attributes
        )

def titan_package(name, version, summary, libraries, deps = [], srcs = ["__init__.py"], scripts = {}, visibility = None):
    """A package with a version of its own, from which a wheel can be built.

    Makes three targets:
      name: the package's `__init__.py`, which each of its libraries reaches through deps.
      package: everything in the package.
      wheel: bazel-bin/titan/<package>/titan_<package>-<version>-py3-none-any.whl.

    Args:
      name: the package's name, which is its folder's too.
      version: the package's version, by semantic versioning.
      summary: one line on what it is, for the wheel's metadata.
      libraries: the package's libraries, by label; what they reach in the package counts
        too, so only those that no other depends on have to be named.
      deps: the deps of the `__init__.py`.
      srcs: the `__init__.py`.
      scripts: console scripts of the wheel: name to package.module:function.
      visibility: who may use the package's targets made here.
    """
    distribution = "titan-" + (name if name != "titan" else "base")
    titan_library(
        name = name,
        srcs = srcs,
        tags = ["titan-distribution=%s==%s" % (distribution, version)],
        visibility = visibility,
        deps = deps,
    )
    titan_library(
        name = "package",
        visibility = visibility,
        deps = [":" + name] + libraries,
    )
    wheel(
        name = "wheel",
        distribution = distribution,
        scripts = scripts,
        summary = summary,
        version = version,
        visibility = visibility,
        deps = [":package"],
    )

def titan_moved(labels):
    """Keeps old names of targets that have moved to other packages, each with a warning that says the new label.

    Args:
      labels: the new label by old name.
    """
    for name, actual in labels.items():
        native.alias(
            name = name,
            actual = actual,
            deprecation = "it is now %s; the old label goes away with version 0.3" % actual,
            visibility = ["//visibility:public"],
        )
