"""Writes into the BUILD files the deps that the imports of their files ask for.

    ./bazelw run //tools:fix_deps            # adds what is missing
    ./bazelw run //tools:fix_deps -- --check # only lists it; exit code 1 if there is any

A dep that no import asks for is left alone: a test may start a program by name. What cannot be written (a module that
does not exist, a target made by a list comprehension) is listed, and the exit code is 1.
"""

import argparse
import ast
import collections
import pathlib
import sys

from tools.repository import workspace
from tools.repository.declared_deps import Undeclared, undeclared_imports


def main(argv: list[str] | None = None) -> int:
    """Adds the missing deps of the checkout that this program was built from, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only list what is missing")
    only_list = parser.parse_args(argv).check
    root = workspace.source_root()
    files = workspace.python_files(root)
    imports = [imported for file in files for imported in workspace.imports_of(file, (root / file).read_text())]
    missing = list(undeclared_imports(workspace.read_targets(root), files, imports))
    added, left = (0, missing) if only_list else add_deps(root, missing)
    for undeclared in left:
        print(undeclared)
    print(f"{added} deps written, {len(left)} left to you")
    return 1 if left else 0


def add_deps(root: pathlib.Path, missing: list[Undeclared]) -> tuple[int, list[Undeclared]]:
    """Adds deps to BUILD files.

    Args:
        root: the repository.
        missing: what to add.

    Returns:
        How many were added, and those that could not be.
    """
    wanted = collections.defaultdict(dict)
    left = []
    for undeclared in missing:
        if undeclared.labels:
            wanted[undeclared.target].setdefault(undeclared.labels[0], undeclared)
        else:
            left.append(undeclared)
    added = 0
    for target, labels in wanted.items():
        package, _, name = target.removeprefix("//").partition(":")
        build_file = root / package / "BUILD.bazel"
        text = with_deps(build_file.read_text(), package, name, list(labels))
        if text is None:
            left += labels.values()
        else:
            build_file.write_text(text)
            added += len(labels)
    return added, left


def with_deps(text: str, package: str, name: str, labels: list[str]) -> str | None:
    """Returns a BUILD file's text with labels added to the deps of one target; None if no call names the target.

    Args:
        text: the BUILD file.
        package: its package, such as `titan/core`.
        name: the target's name.
        labels: absolute labels to add.
    """
    call = next((call for call in _calls(text) if _name_of(call) == name), None)
    if call is None:
        return None
    deps = next((keyword.value for keyword in call.keywords if keyword.arg == "deps"), None)
    lines = text.splitlines(keepends=True)
    present = [ast.literal_eval(element) for element in deps.elts] if isinstance(deps, ast.List) else []
    if deps is not None and not isinstance(deps, ast.List):
        return None
    short = [shortened_label(label, package) for label in labels]
    block = [
        "    deps = [\n",
        *(f'        "{label}",\n' for label in sorted({*present, *short}, key=_order)),
        "    ],\n",
    ]
    if deps is None:
        lines[call.end_lineno - 1 : call.end_lineno - 1] = block
    else:
        lines[deps.lineno - 1 : deps.end_lineno] = block
    return "".join(lines)


def shortened_label(label: str, package: str) -> str:
    """Writes a label as buildifier does: `:a` within its package, `//x/a` for `//x/a:a`."""
    where, _, name = label.partition(":")
    if where == f"//{package}":
        return f":{name}"
    return where if where.startswith("//") and where.rpartition("/")[2] == name else label


def _calls(text: str) -> list[ast.Call]:
    statements = ast.parse(text).body
    return [node.value for node in statements if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]


def _name_of(call: ast.Call) -> str | None:
    named = [keyword.value for keyword in call.keywords if keyword.arg == "name"]
    return named[0].value if named and isinstance(named[0], ast.Constant) else None


def _order(label: str) -> tuple:
    # buildifier's: labels of the package, of the repository, of others; a colon before a slash.
    kind = 0 if label.startswith(":") else 1 if label.startswith("//") else 2
    return kind, label.replace(":", "\0").replace("/", "\1")


if __name__ == "__main__":
    sys.exit(main())
