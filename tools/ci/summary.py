"""Prints 'N passed, N failed, N skipped' from a Bazel build event file.

    summary.py BUILD_EVENTS.json

Counts test cases, from the XML report of each test, cached results and shards
included. A test that crashed or ran out of time counts as one failure, and so
does a target that was not built. Exits with 1 where anything failed or no test
ran. Runs on the system's Python: standard library only.
"""

import json
import pathlib
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree


def summarize(lines: list[str]) -> tuple[int, int, int]:
    """Returns the numbers passed, failed and skipped in a build event file's lines."""
    attempts: dict[tuple, dict] = {}  # (label, run, shard) -> its last attempt
    unbuilt = set()
    for line in lines:
        event = json.loads(line)
        identity = event["id"]
        if "testResult" in event:
            key = identity["testResult"]
            attempts[key["label"], key.get("run", 0), key.get("shard", 0)] = event["testResult"]
        elif "targetCompleted" in identity and not event.get("completed", {}).get("success"):
            unbuilt.add(identity["targetCompleted"]["label"])
        elif "pattern" in identity and "aborted" in event:
            unbuilt.add(" ".join(identity["pattern"].get("pattern", [])))
    total_passed = total_failed = total_skipped = 0
    for result in attempts.values():
        passed, failed, skipped = _count_cases(result)
        if result["status"] not in ("PASSED", "FLAKY") and not failed:
            failed = 1  # a crash or a time-out left no report that says so
        total_passed += passed
        total_failed += failed
        total_skipped += skipped
    total_failed += len(unbuilt - {label for label, _, _ in attempts})
    return total_passed, total_failed, total_skipped


def _count_cases(result: dict) -> tuple[int, int, int]:
    passed = failed = skipped = 0
    for output in result.get("testActionOutput", []):
        if output["name"] != "test.xml":
            continue
        try:
            root = ElementTree.parse(urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)).getroot()
        except (OSError, ElementTree.ParseError):
            continue
        for case in root.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed += 1
            elif case.find("skipped") is not None:
                skipped += 1
            else:
                passed += 1
    return passed, failed, skipped


def main(path: str) -> int:
    """Prints the summary of the event file at `path` and returns the exit code."""
    passed, failed, skipped = summarize(pathlib.Path(path).read_text(encoding="utf-8").splitlines())
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
