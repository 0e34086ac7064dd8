"""Runs pytest as a Bazel test: its filter, shards, temporary folders and XML report.

The environment that every test gets is set here, before anything is imported, and
can be overridden with --test_env: one thread for OpenMP (several tests run at
once), JAX on the CPU, and a home folder in the test's own temporary folder.
"""

import os
import resource
import sys

if os.environ.get("TEST_TMPDIR"):
    os.environ["HOME"] = os.path.join(os.environ["TEST_TMPDIR"], "home")
    os.makedirs(os.environ["HOME"], exist_ok=True)
    os.environ.pop("XDG_CACHE_HOME", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest  # noqa: E402
from _pytest.junitxml import xml_key  # noqa: E402

_INI = os.path.join(os.path.dirname(__file__), "..", "..", "pytest.ini")


class _Shard:
    """Keeps every n-th collected test, as TEST_TOTAL_SHARDS asks."""

    def __init__(self, index: int, total: int):
        self.index = index
        self.total = total

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        dropped = [item for i, item in enumerate(items) if i % self.total != self.index]
        items[:] = items[self.index :: self.total]
        if dropped:
            config.hook.pytest_deselected(items=dropped)


class _CpuSeconds:
    """Notes in the XML report the CPU seconds of this process and of those that it has waited for."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        report = session.config.stash.get(xml_key, None)
        if report:
            used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            report.add_global_property("cpu_seconds", round(sum(u.ru_utime + u.ru_stime for u in used), 1))


def main(argv: list[str]) -> int:
    """Runs pytest over argv (test files and options) and returns the exit code."""
    env = os.environ
    args = ["-p", "no:cacheprovider", "--rootdir=" + os.getcwd(), "-c", _INI]
    plugins = []
    narrowed = False
    if env.get("XML_OUTPUT_FILE"):
        args.append("--junitxml=" + env["XML_OUTPUT_FILE"])
    if env.get("TEST_TMPDIR"):
        args.append("--basetemp=" + os.path.join(env["TEST_TMPDIR"], "pytest"))
    if env.get("TESTBRIDGE_TEST_ONLY"):
        args += ["-k", env["TESTBRIDGE_TEST_ONLY"]]
        narrowed = True
    if env.get("TESTBRIDGE_TEST_RUNNER_FAIL_FAST") == "1":
        args.append("--exitfirst")
    if int(env.get("TEST_TOTAL_SHARDS") or 1) > 1:
        if env.get("TEST_SHARD_STATUS_FILE"):
            with open(env["TEST_SHARD_STATUS_FILE"], "a"):
                pass
        plugins.append(_Shard(int(env["TEST_SHARD_INDEX"]), int(env["TEST_TOTAL_SHARDS"])))
        narrowed = True
    plugins.append(_CpuSeconds())
    code = pytest.main(args + argv, plugins=plugins)
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and narrowed:
        return 0  # another shard or target holds the tests asked for
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
