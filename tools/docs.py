"""Rewrites the sections of the documents that are made from the code.

./bazelw run //tools:docs
./bazelw run //tools:docs -- --check   # only lists the documents that differ; exit code 1 if there are any

A section stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import argparse
import dataclasses
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping

from titan.core.config.sections import with_sections
from titan.core.config.tree import Leaf, is_node, leaves
from titan.core.data.images.config import ImageDataConfig
from titan.models.registry import FAMILIES
from titan.train.config.run import Config
from titan.train.config.sampling import SamplingConfig
from titan.train.sharding.mesh_axes import MESH_AXES
from tools.repository import workspace

_SECTION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SUMMARY = re.compile(r'name = "(\w+)",.*?summary = "([^"]*)"', re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    """Rewrites the documents of the checkout that this program was built from, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only list the documents that differ")
    only_list = parser.parse_args(argv).check
    root = workspace.source_root()
    changed = {path: text for path, text in renewed(root).items() if path.read_text(encoding="utf-8") != text}
    for path, text in changed.items():
        print(path.relative_to(root))
        if not only_list:
            path.write_text(text, encoding="utf-8")
    print(f"{len(changed)} documents {'differ' if only_list else 'rewritten'}")
    return 1 if only_list and changed else 0


def renewed(root: pathlib.Path) -> dict[pathlib.Path, str]:
    """Every document with a generated section, by its path, as it should be.

    Raises:
      KeyError: a section has a name that nothing here makes.
    """
    found = {}
    for path in sorted([root / "README.md", *(root / "docs").glob("*.md")]):
        text = path.read_text(encoding="utf-8")
        if _SECTION.search(text):
            found[path] = _SECTION.sub(lambda match: match[1] + _SECTIONS[match[2]](root) + match[3], text)
    return found


def _flags(_: pathlib.Path) -> str:
    config = with_sections(Config(sampling=SamplingConfig()))
    own = [leaf for leaf in leaves(config) if "." not in leaf.path]
    parts = [("The run", "", own)]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "model":
            for name, family in FAMILIES.items():
                parts.append((f"model: {name.removesuffix('Config')}", "", leaves(family(), "model")))
        elif is_node(value):
            parts.append((field.name, field.metadata["help"], leaves(value, field.name)))
        if field.name == "data":
            parts.append(("data: images", "Where the model is one of images.", leaves(ImageDataConfig(), "data")))
    return "\n".join(_section(*part) for part in parts)


def _section(title: str, text: str, flags: Iterable[Leaf]) -> str:
    lines = [f"### {title}", "", *([text, ""] if text else []), "| flag | default | meaning |", "|---|---|---|"]
    return "\n".join([*lines, *map(_row, flags)]) + "\n"


def _row(leaf: Leaf) -> str:
    default = ",".join(map(str, leaf.value)) if isinstance(leaf.value, tuple) else str(leaf.value)
    choices = f" One of {', '.join(leaf.choices)}." if leaf.choices else ""
    text = f"{leaf.help}{choices}".replace("|", "\\|")
    return f"| `--{leaf.path}` | {f'`{default}`' if default else ''} | {text} |"


def _packages(root: pathlib.Path) -> str:
    lines = ["| package | what it is |", "|---|---|"]
    for package in workspace.PACKAGES:
        match = _SUMMARY.search((root / "titan" / package / "BUILD.bazel").read_text(encoding="utf-8"))
        lines.append(f"| `titan/{package}` | {match[2]} |")
    return "\n".join(lines) + "\n"


def _mesh_axes(_: pathlib.Path) -> str:
    rows = [f"| `{axis.name}` | `--parallelism.{axis.flag}` | {axis.meaning} |" for axis in MESH_AXES]
    return "\n".join(["| axis | flag | its devices have |", "|---|---|---|", *rows]) + "\n"


_SECTIONS: Mapping[str, Callable[[pathlib.Path], str]] = {
    "flags": _flags,
    "mesh_axes": _mesh_axes,
    "packages": _packages,
}


if __name__ == "__main__":
    sys.exit(main())
