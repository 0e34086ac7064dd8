"""Runs the exhaustive parts of the tests, which continuous integration leaves out: about an hour.

    ./bazelw run //tools/bench:exhaustive -- [LABELS]

Every target that `titan_test(exhaustive = True)` makes, or those named, such as
//titan/graph/lowering/opinfo:opinfo_test_exhaustive. Bazel prints what fails.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from tools.ci import summary


def exhaustive_targets(bazel: str, root: pathlib.Path) -> list[str]:
    """The labels of all targets tagged `exhaustive`, in the workspace at `root`."""
    query = [bazel, "query", "attr(tags, '\\bexhaustive\\b', tests(//...))", "--output=label", "--noshow_progress"]
    return subprocess.run(query, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def main(labels: list[str]) -> int:
    """Runs the targets and prints a line `RESULT {flat JSON}`; returns 1 where something failed."""
    root = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY") or os.getcwd())
    bazel = str(root / "bazelw")
    labels = labels or exhaustive_targets(bazel, root)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        events = pathlib.Path(folder) / "events.json"
        command = [bazel, "test", "--keep_going", "--jobs=2", f"--build_event_json_file={events}", *labels]
        subprocess.run(command, cwd=root, check=False)  # what fails is counted below
        lines = events.read_text(encoding="utf-8").splitlines()
    passed, failed, skipped = summary.summarize(lines)
    cpu_seconds = sum(each.cpu_seconds or 0.0 for each in summary.durations_of(lines))
    result = {
        "bench": "exhaustive",
        "targets": len(labels),
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(cpu_seconds, 1),
    }
    print(f"RESULT {json.dumps(result)}", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
