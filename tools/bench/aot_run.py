"""One ahead-of-time compilation of a recipe, as a user starts it: a process of its own, with a time limit."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

from titan.graph.aot.report import Report, from_json


@dataclasses.dataclass(frozen=True)
class AotRun:
    """What became of it.

    Attributes:
      report: None if there is none.
      failure: why there is none, in one line; "" if there is one.
      cpu_seconds: of the whole process, imports included.
      peak_rss_bytes: the most memory that the process held.
    """

    report: Report | None
    failure: str
    cpu_seconds: float
    peak_rss_bytes: int

    @property
    def compile_seconds(self) -> float:
        """Wall time of all stages: capture and its check, passes, lowering, XLA."""
        return sum(self.report.seconds.values()) if self.report else 0.0


def aot_run(recipe: str, flags: Sequence[str], timeout_seconds: float) -> AotRun:
    """Compiles a recipe.

    Args:
      recipe: a module of titan.train.recipes.
      flags: such as "--hardware=v6e-2x4"; `--aot`, the report's file and that nothing is cached are added.
      timeout_seconds: after which the process is ended.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", errors="replace") as output:
        path = pathlib.Path(folder, "report.json")
        # Without a cache: programs of split steps that were kept would not be compiled.
        own = ("--aot", f"--aot.report={path}", "--compile.cache_folder=")
        command = (sys.executable, "-m", f"titan.train.recipes.{recipe}", *own, *flags)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        environment.setdefault("JAX_PLATFORMS", "cpu")
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        ended_late = threading.Event()

        def end() -> None:
            ended_late.set()
            process.kill()

        timer = threading.Timer(timeout_seconds, end)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        report = from_json(path.read_text(encoding="utf-8")) if path.exists() else None
        failure = "" if report else _failure(process.returncode, output, timeout_seconds if ended_late.is_set() else 0)
    return AotRun(report, failure, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def _failure(code: int, output, limit_seconds: float) -> str:
    if limit_seconds:
        return f"ended after the limit of {limit_seconds:.0f} s"
    if code < 0:
        return f"ended by signal {-code}"
    output.seek(0)
    lines = [line.strip() for line in output if line.strip()]
    return f"code {code}: {lines[-1][:300] if lines else 'no output'}"
