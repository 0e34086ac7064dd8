"""Formats and lints the repository: Python by ruff, BUILD files by buildifier where npm's npx is there to run it.

./bazelw run //tools:lint
./bazelw run //tools:lint -- --check   # changes nothing; exit code 1 if anything is to be changed
"""

import argparse
import pathlib
import shutil
import subprocess
import sys

from tools.repository import workspace

_BUILDIFIER = "@bazel/buildifier@8.2.1"


def main(argv: list[str] | None = None) -> int:
    """Lints the checkout that this program was built from, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(argv).check
    root = workspace.source_root()
    codes = [
        subprocess.run(command, cwd=root).returncode for command in (*ruff_commands(check), *_buildifier(root, check))
    ]
    return int(any(codes))


def ruff_commands(check: bool) -> list[list[str]]:
    """The command lines of the locked ruff, to be run at the root."""
    ruff = [sys.executable, "-m", "ruff"]
    if check:
        return [[*ruff, "check", "--no-cache"], [*ruff, "format", "--no-cache", "--check"]]
    return [[*ruff, "check", "--fix"], [*ruff, "format"]]


def _buildifier(root: pathlib.Path, check: bool) -> list[list[str]]:
    if not shutil.which("npx"):
        print("BUILD files are left out: there is no npx, which runs buildifier", file=sys.stderr)
        return []
    files = [*root.rglob("BUILD.bazel"), *root.rglob("*.bzl"), *root.glob("*.bazel")]
    names = sorted(str(file.relative_to(root)) for file in files if "bazel-" not in str(file.relative_to(root)))
    return [["npx", "--yes", _BUILDIFIER, "--mode=check" if check else "--mode=fix", *names]]


if __name__ == "__main__":
    sys.exit(main())
