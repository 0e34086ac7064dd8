"""Writes docs/supported_ops.md, the list of ATen overloads that have a lowering, from the table.

python -m titan.graph.lowering.supported_ops docs/supported_ops.md
"""

import collections
import pathlib
import sys
from collections.abc import Mapping

from titan.graph.lowering.ops import TABLE
from titan.graph.lowering.table import Lowering

_HEADER = """# Supported ops

The overloads that the `xla` executor lowers to JAX, by the file of `titan/graph/lowering` that holds them. Each is
tested against PyTorch, on OpInfo's samples where it has any. This page is made from the table:

    ./bazelw run //titan/graph/lowering:write_supported_ops -- docs/supported_ops.md
"""


def render(table: Mapping[str, Lowering]) -> str:
    """The page: one section per file, one line per op with its overloads."""
    by_file: dict[str, dict[str, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for name, function in table.items():
        op, _, overload = name.rpartition(".")
        by_file[function.__module__.rpartition(".")[2]][op].append(overload)
    parts = [_HEADER, f"{len(table)} overloads.\n"]
    for file, ops in sorted(by_file.items()):
        count = sum(map(len, ops.values()))
        parts.append(f"## {file} ({count})\n")
        parts += [f"- `{op}`: {', '.join(sorted(overloads))}" for op, overloads in sorted(ops.items())]
        parts.append("")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Writes the page to the one file named on the command line."""
    if len(arguments) != 1:
        print("usage: supported_ops FILE, such as docs/supported_ops.md", file=sys.stderr)
        return 2
    pathlib.Path(arguments[0]).write_text(render(TABLE), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
