"""Prints the slowest targets of a Bazel build event file, and 'N passed, N failed, N skipped' as the last line.

    python -m tools.ci.summary BUILD_EVENTS.json

Counts test cases, from the XML report of each test, cached results and shards
included. A test that crashed or ran out of time counts as one failure, and so
does a target that was not built. Exits with 1 where anything failed, no test
ran or a target took longer than `durations` allows on a machine of this speed.
Runs on the system's Python: standard library only.
"""

import json
import pathlib
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from tools.ci import durations


def summarize(lines: list[str]) -> tuple[int, int, int]:
    """Returns the numbers passed, failed and skipped in a build event file's lines."""
    attempts = _last_attempts(lines)
    total_passed = total_failed = total_skipped = 0
    for result in attempts.values():
        passed, failed, skipped = _count_cases(result)
        if result["status"] not in ("PASSED", "FLAKY") and not failed:
            failed = 1  # a crash or a time-out left no report that says so
        total_passed += passed
        total_failed += failed
        total_skipped += skipped
    total_failed += len(_unbuilt(lines) - {label for label, _, _ in attempts})
    return total_passed, total_failed, total_skipped


def durations_of(lines: list[str]) -> list[durations.Duration]:
    """Returns what each target in a build event file's lines took, in its longest shard."""
    longest: dict[str, durations.Duration] = {}
    for (label, _, _), result in _last_attempts(lines).items():
        cpu_seconds = [
            float(note.get("value"))
            for root in _reports(result)
            for note in root.iter("property")
            if note.get("name") == "cpu_seconds"
        ]
        seconds = int(result.get("testAttemptDurationMillis", 0)) / 1000
        shard = durations.Duration(label, seconds, sum(cpu_seconds) if cpu_seconds else None)
        if label not in longest or shard.own_seconds > longest[label].own_seconds:
            longest[label] = shard
    return list(longest.values())


def _last_attempts(lines: list[str]) -> dict[tuple[str, int, int], dict]:
    """The results by label, run and shard."""
    attempts = {}
    for event in map(json.loads, lines):
        if "testResult" in event:
            key = event["id"]["testResult"]
            attempts[key["label"], key.get("run", 0), key.get("shard", 0)] = event["testResult"]
    return attempts


def _unbuilt(lines: list[str]) -> set[str]:
    """Labels, or patterns that name none."""
    unbuilt = set()
    for event in map(json.loads, lines):
        identity = event["id"]
        if "targetCompleted" in identity and not event.get("completed", {}).get("success"):
            unbuilt.add(identity["targetCompleted"]["label"])
        elif "pattern" in identity and "aborted" in event:
            unbuilt.add(" ".join(identity["pattern"].get("pattern", [])))
    return unbuilt


def _reports(result: dict) -> Iterator[ElementTree.Element]:
    for output in result.get("testActionOutput", []):
        if output["name"] != "test.xml":
            continue
        try:
            yield ElementTree.parse(urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)).getroot()
        except (OSError, ElementTree.ParseError):
            continue


def _count_cases(result: dict) -> tuple[int, int, int]:
    passed = failed = skipped = 0
    for root in _reports(result):
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
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    times = durations.slowness(durations.workload_seconds())
    taken = durations_of(lines)
    print("\n".join(durations.table(taken, times)))
    slow = durations.too_slow(taken, times)
    for each in slow:
        print(f"TOO SLOW {each.label}: {each.own_seconds:.0f} seconds; make it smaller, or a part of it exhaustive")
    passed, failed, skipped = summarize(lines)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or slow or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
