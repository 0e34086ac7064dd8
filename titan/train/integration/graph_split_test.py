"""`--tpu_config.use_graph_split`: a step in pieces against the whole one, and which programs it takes."""

import collections
import dataclasses
import os
import re
import signal
import time

import jax
import pytest

from titan.graph.split.executable import compile_split
from titan.graph.split.pieces import Loop
from titan.train.testing.case import FSDP, HSDP, Case
from titan.train.testing.executed import evaluate_xla, run_torch, run_xla
from titan.train.testing.graphs import graph_of
from titan.train.testing.models import NUM_LAYERS
from titan.train.testing.outcome import assert_same
from titan.train.testing.runs import Ended, Workplace, wait

# float32: devices and pieces sum in another order than PyTorch on one device.
TOLERANCE = 1e-5

CASES = {
    "nothing_made_again": Case("llama3", split=True),
    "microbatches": Case("llama3", HSDP, split=True, memory_policy="full", microbatches=2),
    "layers_that_differ": Case("pattern", FSDP, split=True, memory_policy="offload"),
    "mixture_of_experts": Case("qwen3_moe", FSDP, split=True, memory_policy="full"),
}


@pytest.mark.parametrize("name", CASES)
def test_pieces_train_as_the_whole_does_in_pytorch(name):
    case = CASES[name]
    assert_same(run_xla(case), run_torch(Case(case.model)), TOLERANCE)


def test_pieces_equal_the_whole_to_the_last_places():
    whole, pieces = run_xla(Case("llama3")), run_xla(CASES["nothing_made_again"])
    assert_same(pieces, whole, 1e-6)


def test_evaluation_in_pieces():
    whole = evaluate_xla(Case("pattern"))
    pieces = evaluate_xla(Case("pattern", FSDP, split=True))
    assert pieces.keys() == whole.keys()
    for name, value in pieces.items():
        assert value == pytest.approx(whole[name], rel=1e-6), name


def programs(case: Case) -> tuple[collections.Counter, int]:
    """How often a step runs each program, and how many it compiles."""
    compiled = []
    executable = compile_split(graph_of(case), jax.devices(), compile_program=compiled.append)
    calls: collections.Counter = collections.Counter()
    for piece, signature in zip(executable.split.pieces, executable.signatures, strict=True):
        calls[signature] += piece.num_turns if isinstance(piece, Loop) else 1
    assert calls.keys() == executable.programs.keys()
    return calls, len(compiled)


def test_equal_layers_have_one_program():
    few, num_few = programs(Case("llama3", split=True))
    many, num_many = programs(Case("llama3_deep", split=True))
    assert num_few == num_many == len(few) == len(many)
    # Forward and backward.
    assert sorted(few.values())[-2:] == [NUM_LAYERS] * 2
    assert sorted(many.values())[-2:] == [4 * NUM_LAYERS] * 2


def test_layers_of_two_forms_have_programs_of_two_forms():
    calls, num_compiled = programs(CASES["layers_that_differ"])
    assert num_compiled == len(calls)
    # Of five layers three are wide and two are not; forward, backward, and the zeros that its gradients begin as.
    assert collections.Counter(calls.values()) == {3: 3, 2: 3, 1: 3}


def test_microbatches_share_programs():
    _, num_four = programs(Case("llama3", split=True, microbatches=4))
    _, num_eight = programs(Case("llama3", split=True, microbatches=8))
    assert num_four == num_eight


_HIT_OR_MISS = re.compile(r"compilation cache (hit|MISS) for '\w+' with key '([\w-]+)'", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Restart:
    """A start that was killed while it compiled, and the next one, which ran to the end.

    Attributes:
      workplace: where both ran.
      before, after: keys of the pieces in the compile cache before and after the second start.
      second: that start.
    """

    workplace: Workplace
    before: set[str]
    after: set[str]
    second: Ended


@pytest.fixture(scope="module")
def restart(tmp_path_factory) -> Restart:
    workplace = Workplace(tmp_path_factory.mktemp("restart"))
    flags = ("--tpu_config.use_graph_split", "--training.steps=2", "--checkpoint.interval=1000000")
    first = workplace.start("run", *flags)
    deadline = time.monotonic() + 600
    while len(_kept(workplace)) < 2:
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    wait(first)
    before = _kept(workplace)
    with pytest.MonkeyPatch.context() as patch:
        # Not for the first start: nobody reads what it says while it runs, and it would wait for a reader.
        patch.setenv("JAX_LOG_COMPILES", "1")  # hits
        patch.setenv("JAX_EXPLAIN_CACHE_MISSES", "1")
        second = workplace.run("run", *flags)
    return Restart(workplace, before, _kept(workplace), second)


def test_a_killed_compilation_goes_on_where_it_was(restart):
    assert restart.second.code == 0
    found = collections.defaultdict(set)
    for line in restart.second.err:
        if (match := _HIT_OR_MISS.search(line)) and match[2].startswith(_PIECES):
            found[match[1].lower()].add(match[2])
    assert found["hit"] == restart.before
    assert found["miss"] == restart.after - restart.before != set()


def test_a_checkpoint_of_pieces_goes_on_whole(restart):
    ended = restart.workplace.train("run", "--training.steps=3", "--checkpoint.interval=1000000")
    assert f"resumed from {restart.workplace.folder}/run/checkpoints/2" in ended.out


_PIECES = "jit_piece_"


def _kept(workplace: Workplace) -> set[str]:
    """Keys of the pieces in the compile cache."""
    names = (path.name for path in workplace.compiled)
    return {name.removesuffix("-cache") for name in names if name.startswith(_PIECES) and name.endswith("-cache")}
