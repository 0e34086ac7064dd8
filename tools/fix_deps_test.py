"""What fix_deps makes of a BUILD file's text."""

from tools.fix_deps import add_deps, shortened_label, with_deps
from tools.repository.declared_deps import Undeclared
from tools.repository.workspace import Import

_BUILD = """\
titan_library(
    name = "a",
    srcs = ["a.py"],
    deps = [":z", "@pypi//:torch"],
)

titan_library(
    name = "b",
    srcs = ["b.py"],
)

[titan_library(name = name, srcs = [name + ".py"]) for name in ["c"]]
"""


def test_deps_are_added_to_those_that_are_there_in_buildifiers_order():
    text = with_deps(
        _BUILD, "titan/x", "a", ["//titan/x:b", "//titan/core:core", "//titan/core/config:tree", "@pypi//:jax"]
    )
    expected = """\
    deps = [
        ":b",
        ":z",
        "//titan/core",
        "//titan/core/config:tree",
        "@pypi//:jax",
        "@pypi//:torch",
    ],
"""
    assert expected in text
    assert with_deps(text, "titan/x", "a", ["//titan/x:b"]) == text  # nothing is added twice


def test_a_target_without_deps_gets_some():
    text = with_deps(_BUILD, "titan/x", "b", ["@pypi//:torch"])
    assert 'srcs = ["b.py"],\n    deps = [\n        "@pypi//:torch",\n    ],\n)' in text


def test_what_cannot_be_written_is_left_to_the_user(tmp_path):
    folder = tmp_path / "titan" / "x"
    folder.mkdir(parents=True)
    (folder / "BUILD.bazel").write_text(_BUILD)
    imported = Import("titan/x/c.py", 1, "torch", (), False)
    of_comprehension = Undeclared(imported, "//titan/x:c", ("@pypi//:torch",))
    missing = Undeclared(imported, "//titan/x:b", (), "there is no such module")
    writable = Undeclared(imported, "//titan/x:b", ("@pypi//:torch",))
    assert add_deps(tmp_path, [of_comprehension, missing, writable]) == (1, [missing, of_comprehension])
    assert str(missing) == "titan/x/c.py:1: imports torch: there is no such module"


def test_labels_are_shortened_as_buildifier_does():
    assert shortened_label("//titan/x:b", "titan/x") == ":b"
    assert shortened_label("//titan/core:core", "titan/x") == "//titan/core"
    assert shortened_label("@pypi//:torch", "titan/x") == "@pypi//:torch"
