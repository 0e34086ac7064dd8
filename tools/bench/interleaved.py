"""Contenders of a benchmark in turns of one step, and what their turns say."""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tools.bench.worker import Turn, Worker

WARMUP_ROUNDS = 2  # compilation, and the first step after it
_PAUSE_SECONDS = 0.25  # before each turn: the OpenMP threads of the turn before may spin for 0.2 s

Turns = Mapping[str, Sequence[Turn]]
"""Contender to its turns, one a round."""


def take_turns(workers: Mapping[str, Worker], rounds: Sequence[tuple[Any, ...]]) -> dict[str, list[Turn]]:
    """Has each contender step once a round, in shuffled order, and prints a line a round.

    Args:
      workers: the contenders; each step must return a loss.
      rounds: the arguments of each round's steps.
    """
    names = list(workers)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    order = random.Random(0)
    for index, arguments in enumerate(rounds):
        # Shuffled: the turn after another's is slower or faster by what that one left in caches and free memory.
        for name in order.sample(names, len(names)):
            time.sleep(_PAUSE_SECONDS)
            turns[name].append(workers[name].step(*arguments))
        print(
            f"step {index + 1}/{len(rounds)}  "
            + "  ".join(f"{name} {turns[name][-1].seconds:.3f} s {turns[name][-1].result:.6f}" for name in names),
            flush=True,
        )
    return turns


def ratios(turns: Turns, pairs: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """How much faster contenders are than their peers: medians and quartiles over the rounds, without the warm-up.

    A ratio is of two step times of one round, so that a load on the machine that lasts longer than a round falls on
    both.

    Args:
      turns: of all contenders.
      pairs: name of a ratio to (contender, peer): above 1 where the contender is faster.
    """
    numbers: dict[str, float] = {}
    for name, (ours, peer) in pairs.items():
        both = zip(turns[ours][WARMUP_ROUNDS:], turns[peer][WARMUP_ROUNDS:], strict=True)
        quartiles = statistics.quantiles([b.seconds / a.seconds for a, b in both], n=4, method="inclusive")
        numbers |= {name: quartiles[1], f"{name}_q1": quartiles[0], f"{name}_q3": quartiles[2]}
    return numbers


def max_difference(turns: Turns, baseline: str) -> float:
    """The largest difference of any contender's loss from the baseline's in any round, the warm-up's included."""
    expected = [turn.result for turn in turns[baseline]]
    return max(
        abs(turn.result - loss) for of_one in turns.values() for turn, loss in zip(of_one, expected, strict=True)
    )


def medians(turns: Turns) -> dict[str, float]:
    """Each contender's median wall time and CPU time of a step in seconds, without the warm-up."""
    numbers: dict[str, float] = {}
    for name, of_one in turns.items():
        timed = of_one[WARMUP_ROUNDS:]
        numbers[f"{name}_step_s"] = statistics.median(turn.seconds for turn in timed)
        numbers[f"{name}_cpu_s"] = statistics.median(turn.cpu_seconds for turn in timed)
    return numbers
