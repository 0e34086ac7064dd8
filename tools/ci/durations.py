"""Which targets take long, and whether too long for a machine of this speed."""

import dataclasses
import time

# On a fast machine, with two tests at once.
LIMIT_SECONDS = 100.0
# A target has to be over its limit by this much to fail: shared machines differ by as much between two runs.
MARGIN = 2.0
# What `workload_seconds` gives on a fast machine.
_FAST_WORKLOAD_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Duration:
    """What a target took, its shards together.

    Attributes:
        label: of the target.
        seconds: by the clock; those of the longest shard.
        cpu_seconds: of its processes, likewise; None where it left no report.
    """

    label: str
    seconds: float
    cpu_seconds: float | None

    @property
    def own_seconds(self) -> float:
        """What cannot be blamed on others.

        By the clock a target waits for whatever else runs on the machine, and the CPU seconds of one with several
        processes add up although it takes less. Only what is long in both is long.
        """
        return self.seconds if self.cpu_seconds is None else min(self.seconds, self.cpu_seconds)


def workload_seconds(repeats: int = 5) -> float:
    """CPU seconds of a fixed piece of work, the least of several tries: calls, dicts and text of an interpreter."""
    return min(_work() for _ in range(repeats))


def _work() -> float:
    start = time.process_time()
    counts: dict[str, int] = {}
    for number in range(400_000):
        word = str(number * 7919 % 1009)
        counts[word] = counts.get(word, 0) + len(word)
    sorted(counts.items())
    return time.process_time() - start


def slowness(seconds: float) -> float:
    """How many times as long as a fast machine this one needs, by what it took for the fixed work; at least 1."""
    return max(1.0, seconds / _FAST_WORKLOAD_SECONDS)


def too_slow(durations: list[Duration], times: float) -> list[Duration]:
    """The targets clearly over the limit of a machine that needs `times` as long as a fast one, slowest first."""
    over = [duration for duration in durations if duration.own_seconds > LIMIT_SECONDS * times * MARGIN]
    return sorted(over, key=lambda duration: -duration.own_seconds)


def table(durations: list[Duration], times: float, rows: int = 15) -> list[str]:
    """Lines: the slowest targets by the clock, the sums of all, and the limit."""
    slowest = sorted(durations, key=lambda duration: -duration.seconds)[:rows]
    lines = [f"{'seconds':>8} {'CPU':>8}"]
    lines += [f"{each.seconds:8.1f} {_cpu(each)} {each.label}" for each in slowest]
    cpu_seconds = sum(each.cpu_seconds or 0.0 for each in durations)
    lines.append(f"{sum(each.seconds for each in durations):8.1f} {cpu_seconds:8.1f} all {len(durations)} targets")
    lines.append(
        f"This machine needs {times:.2f} times as long as a fast one; a target fails above "
        f"{LIMIT_SECONDS:.0f} x {times:.2f} x {MARGIN} = {LIMIT_SECONDS * times * MARGIN:.0f} seconds, both by the "
        "clock and of CPU time."
    )
    return lines


def _cpu(duration: Duration) -> str:
    return " " * 8 if duration.cpu_seconds is None else f"{duration.cpu_seconds:8.1f}"
