"""Reads the repository's BUILD files and Python imports, for the tests that hold its rules.

A BUILD file is Python in syntax, so it is run as Python with functions that note
what they are called with: lists joined with `+`, variables and comprehensions work.
"""

import ast
import dataclasses
import pathlib
from collections.abc import Iterator

PACKAGES = ("core", "parallel", "kernels", "models", "float8", "graph", "train")
_RULES = ("titan_library", "titan_binary", "titan_test", "titan_package", "py_binary", "py_library", "py_test")


@dataclasses.dataclass(frozen=True)
class Target:
    """A Python target of a BUILD file.

    Attributes:
        label: `//package:name`.
        rule: the macro or rule that makes it.
        srcs: its Python files, relative to the repository's root.
        deps: the labels it depends on directly, absolute.
        testonly: whether only tests may use it.
        exhaustive: whether a second target runs the part of its tests that is marked so.
    """

    label: str
    rule: str
    srcs: tuple[str, ...]
    deps: tuple[str, ...]
    testonly: bool
    exhaustive: bool = False


@dataclasses.dataclass(frozen=True)
class Import:
    """An import of a module.

    Attributes:
        file: the importing file, relative to the repository's root.
        line: its line.
        module: the dotted name as written, made absolute.
        names: dotted names that are modules or attributes of it (`from module import name`).
        deferred: whether it runs only within a function or for the type checker.
    """

    file: str
    line: int
    module: str
    names: tuple[str, ...]
    deferred: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: imports {self.module}"


def source_root() -> pathlib.Path:
    """Returns the root of the checkout that this test was built from."""
    # The runfiles tree links to the source files; outside Bazel this file is the source.
    return pathlib.Path(__file__).resolve().parents[2]


def python_files(root: pathlib.Path) -> list[str]:
    """Returns the Python files under titan/ and tools/, relative to the root."""
    return sorted(str(path.relative_to(root)) for top in ("titan", "tools") for path in (root / top).rglob("*.py"))


def is_test(file: str) -> bool:
    """Whether a file is a test, what tests share, or pytest's configuration of tests."""
    name = file.rpartition("/")[2]
    return name.endswith("_test.py") or name == "conftest.py" or "/testing/" in file or file.startswith("tools/tests/")


def module_name(file: str) -> str:
    """Returns the dotted name of a Python file."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read_targets(root: pathlib.Path) -> list[Target]:
    """Returns the Python targets of every BUILD.bazel under titan/ and tools/."""
    targets = []
    for top in ("titan", "tools"):
        for build_file in sorted((root / top).rglob("BUILD.bazel")):
            package = str(build_file.parent.relative_to(root))
            targets += parse_build_file(build_file.read_text(), package, build_file.parent)
    return targets


def parse_build_file(text: str, package: str, folder: pathlib.Path) -> list[Target]:
    """Returns the Python targets that a BUILD file's text makes.

    Args:
        text: the BUILD file.
        package: its package, such as `titan/core`.
        folder: where its globs look.
    """
    calls: list[tuple[str, dict]] = []
    tree = ast.parse(text)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    functions = {name: (lambda *args, **kwargs: None) for name in called}
    functions["glob"] = lambda include, exclude=(), **kwargs: _glob(folder, include, exclude)
    functions["select"] = lambda branches: [value for branch in branches.values() for value in branch]
    functions["load"] = lambda label, *names: functions.update(_constants(label, package, folder, names))
    defaults: dict = {}
    functions["package"] = defaults.update
    for rule in _RULES:
        functions[rule] = lambda rule=rule, **kwargs: calls.append((rule, kwargs))
    exec(compile(tree, f"{package}/BUILD.bazel", "exec"), functions)

    targets = []
    for rule, attributes in calls:
        name = attributes["name"]
        srcs = attributes.get("srcs", ["__init__.py"] if rule == "titan_package" else [])
        deps = [absolute_label(dep, package) for dep in attributes.get("deps", [])]
        targets.append(
            Target(
                label=f"//{package}:{name}",
                rule=rule,
                srcs=tuple(f"{package}/{src}" for src in srcs),
                deps=tuple(deps),
                testonly=bool(attributes.get("testonly", defaults.get("default_testonly")))
                or rule in ("titan_test", "py_test"),
                exhaustive=attributes.get("exhaustive", False),
            )
        )
        if rule == "titan_package":
            libraries = [absolute_label(label, package) for label in attributes["libraries"]]
            targets.append(Target(f"//{package}:package", rule, (), (f"//{package}:{name}", *libraries), False))
    return targets


def _constants(label: str, package: str, folder: pathlib.Path, names: tuple[str, ...]) -> dict:
    """What a BUILD file loads of a file of constants; nothing of files with rules."""
    where, _, file = label.rpartition(":")
    where = where.removeprefix("//") or package
    if label.startswith("@") or where.startswith("tools/build_defs"):
        return {}
    root = folder.joinpath(*[".."] * len(package.split("/")))
    namespace: dict = {}
    exec((root / where / file).read_text(), namespace)
    return {name: namespace[name] for name in names}


def absolute_label(label: str, package: str) -> str:
    """Writes a label out in full: `:a` and `//b` as `//package:a` and `//b:b`."""
    if label.startswith(":"):
        return f"//{package}{label}"
    if ":" in label:
        return label
    return f"{label}:{label.rpartition('/')[2]}"


def _glob(folder: pathlib.Path, include: list[str], exclude: list[str]) -> list[str]:
    found = {str(path.relative_to(folder)) for pattern in include for path in folder.glob(pattern) if path.is_file()}
    dropped = {str(path.relative_to(folder)) for pattern in exclude for path in folder.glob(pattern)}
    return sorted(found - dropped)


def imports_of(file: str, text: str) -> list[Import]:
    """Returns the imports of one Python file, `importlib.import_module` of a constant included."""
    return list(_imports(ast.parse(text), file, deferred=False))


def _imports(node: ast.AST, file: str, deferred: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(file, child.lineno, alias.name, (), deferred)
        elif isinstance(child, ast.ImportFrom):
            module = child.module or ""
            if child.level:
                package = module_name(file).split(".")
                keep = len(package) - child.level + file.endswith("/__init__.py")
                module = ".".join([*package[:keep], *([module] if module else [])])
            names = tuple(f"{module}.{alias.name}" for alias in child.names)
            yield Import(file, child.lineno, module, names, deferred)
        elif isinstance(child, ast.Call) and ast.unparse(child.func) in ("importlib.import_module", "import_module"):
            if child.args and isinstance(child.args[0], ast.Constant) and isinstance(child.args[0].value, str):
                yield Import(file, child.lineno, child.args[0].value, (), deferred)
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for part, part_deferred in ((child.body, True), (child.orelse, deferred)):
                yield from _imports(ast.Module(body=part, type_ignores=[]), file, part_deferred)
        else:
            yield from _imports(child, file, deferred or is_function)


class Modules:
    """Which file, and so which target, an imported dotted name belongs to."""

    def __init__(self, files: list[str]):
        self._files = {module_name(file): file for file in files}

    def files_of(self, imported: Import) -> set[str]:
        """Returns the repository's files that an import names: modules, not attributes of them."""
        files = set()
        for name in imported.names:
            if name in self._files:
                files.add(self._files[name])
        attributes_too = not imported.names or any(name not in self._files for name in imported.names)
        if attributes_too and imported.module in self._files:
            files.add(self._files[imported.module])
        return files
