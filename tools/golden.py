"""Rewrites the golden files of all recipes and variants.

./bazelw run //tools:golden
./bazelw run //tools:golden -- --check   # only lists the files that differ; exit code 1 if there are any
"""

import argparse
import sys

from titan.train.recipes.golden import rewrite, stale
from tools.repository.workspace import source_root


def main(argv: list[str] | None = None) -> int:
    """Rewrites the files of the checkout that this program was built from, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only list the files that differ")
    only_list = parser.parse_args(argv).check
    folder = source_root() / "titan" / "train" / "recipes" / "golden"
    changed = stale(folder) if only_list else rewrite(folder)
    for name in changed:
        print(name)
    print(f"{len(changed)} golden files {'differ' if only_list else 'rewritten'}")
    return 1 if only_list and changed else 0


if __name__ == "__main__":
    sys.exit(main())
