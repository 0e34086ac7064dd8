"""Checks the types of all Python files by pyrefly, against the findings that are known (tools/types_baseline.json).

./bazelw run //tools:types
./bazelw run //tools:types -- --update   # writes the baseline anew; the number of its entries may only fall
"""

import argparse
import json
import subprocess
import sys

from tools.repository import workspace


def main(argv: list[str] | None = None) -> int:
    """Checks the checkout that this program was built from, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the baseline anew")
    return check(update=parser.parse_args(argv).update).returncode


def check(*, update: bool = False, capture: bool = False) -> subprocess.CompletedProcess:
    """Runs the checker over titan/ and tools/."""
    command = [sys.executable, "-m", "pyrefly", "check", f"--python-interpreter-path={sys.executable}"]
    options = ["--baseline=tools/types_baseline.json", "--update-baseline"] if update else []
    return subprocess.run([*command, *options], cwd=workspace.source_root(), capture_output=capture, text=True)


def num_known() -> int:
    """Findings in the baseline."""
    return len(json.loads((workspace.source_root() / "tools" / "types_baseline.json").read_text())["errors"])


if __name__ == "__main__":
    sys.exit(main())
