"""Compares imports with the deps that BUILD files declare, which Bazel does not do for Python."""

import collections
import dataclasses
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator

from tools.repository import workspace

# Packages of an environment of the user's own, imported only within functions that say what to do without them.
_NOT_LOCKED = ("torch_tpu",)


@dataclasses.dataclass(frozen=True)
class Undeclared:
    """An import that nothing among a target's deps provides.

    Attributes:
        imported: the import.
        target: the label of the importing file's target.
        labels: the labels that provide it, any of which would do; empty where there is none.
        problem: what to say where there is none.
    """

    imported: workspace.Import
    target: str
    labels: tuple[str, ...]
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.imported}: {self.problem}"
        return f"{self.imported}: add {' or '.join(self.labels)} to the deps of {self.target}"


def undeclared_imports(
    targets: Iterable[workspace.Target], files: list[str], imports: Iterable[workspace.Import]
) -> Iterator[Undeclared]:
    """Yields each import that the importing file's target does not declare.

    Args:
        targets: every Python target of the repository.
        files: its Python files, relative to its root.
        imports: the imports to judge.
    """
    modules = workspace.Modules(files)
    owners = collections.defaultdict(list)
    for target in targets:
        for file in target.srcs:
            owners[file].append(target)
    distributions = importlib.metadata.packages_distributions()
    for imported in imports:
        for target in owners[imported.file]:
            top = imported.module.partition(".")[0]
            if top in ("titan", "tools"):
                found = modules.files_of(imported)
                if not found:
                    yield Undeclared(imported, target.label, (), "there is no such module")
                wanted = [{owner.label for owner in owners[file]} for file in found if file not in target.srcs]
            elif top in sys.stdlib_module_names or (top in _NOT_LOCKED and imported.deferred):
                continue
            elif top not in distributions:
                yield Undeclared(imported, target.label, (), "no locked package has it")
                continue
            else:
                names = {name.lower().replace("-", "_").replace(".", "_") for name in distributions[top]}
                wanted = [{f"@pypi//:{name}" for name in names}]
            declared = {*target.deps, *(["@pypi//:pytest"] if target.rule == "titan_test" else [])}
            for labels in wanted:
                if not labels & declared:
                    yield Undeclared(imported, target.label, tuple(sorted(labels)))
