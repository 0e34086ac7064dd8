"""Step time of titan's captured training step against hand-written JAX, PyTorch eager and torch.compile.

    ./bazelw run //tools/bench:step_parity

All train the recipe llama3_debug from the same initial weights on the same batches of real text, each in a process of
its own, in turns of one step in shuffled order. The last line is `RESULT {json}`:

    vs_jax_w1, vs_jax_w4   titan's throughput / that of `jax_llama3.py`, on one device and with FSDP over four virtual
    vs_eager_w1            titan's throughput / that of PyTorch eager, on one device
    vs_compile_w1          titan's throughput / that of torch.compile, on one device
    max_loss_diff          the largest difference of any contender's loss at any step from titan's on one device

A ratio is the median over the rounds of the ratio of two step times of one round, so that a load on the machine that
lasts longer than a round falls on both; `*_q1` and `*_q3` are the quartiles. `*_step_s` and `*_cpu_s` are medians of a
step's wall time and CPU time.
"""

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np

from titan.train.config import Config
from titan.train.recipes.llama3_debug import RECIPE
from tools.bench.llama3_hyperparameters import llama3_hyperparameters
from tools.bench.worker import Contender, Turn, Worker, set_environment

Batch = Mapping[str, np.ndarray]

_WARMUP_ROUNDS = 2  # compilation, and the first step after it
_PAUSE_SECONDS = 0.25  # before each turn: the OpenMP threads of the turn before may spin for 0.2 s
_VIRTUAL_DEVICES = 4
_BASELINE = "titan_w1"
_RATIOS = {
    "vs_jax_w1": ("titan_w1", "jax_w1"),
    "vs_jax_w4": ("titan_w4", "jax_w4"),
    "vs_eager_w1": ("titan_w1", "eager_w1"),
    "vs_compile_w1": ("titan_w1", "compile_w1"),
}


class _TitanTrainer:
    """The recipe's own path: build, capture, lower, compile."""

    def __init__(self, config: Config):
        from titan.train.build import build
        from titan.train.runtime_xla import XlaRuntime

        self._runtime = XlaRuntime(config)
        self._run = build(config, self._runtime)
        self._state = self._run.initial_state()

    def step(self, batch: Batch, learning_rate: float) -> float:
        import jax

        from titan.train.state import LEARNING_RATE

        microbatches = {name: array[None] for name, array in batch.items()}
        inputs = {**microbatches, LEARNING_RATE: np.float32(learning_rate)}
        executable = self._run.train_step.executable_for(inputs)
        self._state, metrics = executable(self._state, executable.place(inputs))
        jax.block_until_ready(self._state)
        return self._runtime.read(metrics)["loss"]


def _jax_trainer(config: Config, weights: Mapping[str, np.ndarray], batch: Batch) -> Contender:
    from titan.train.runtime_xla import XlaRuntime
    from tools.bench.jax_llama3 import Hyperparameters, JaxTrainer

    runtime = XlaRuntime(config)  # starts JAX with the devices and threads that titan has
    return JaxTrainer(weights, batch, Hyperparameters(**llama3_hyperparameters(config)), runtime.num_devices)


def _torch_trainer(config: Config, weights: Mapping[str, np.ndarray], compiled: bool) -> Contender:
    from tools.bench.torch_llama3 import TorchTrainer

    return TorchTrainer(weights, config, compiled=compiled)


def _bench_config(num_devices: int) -> Config:
    """The recipe on so many virtual devices, without a compile cache."""
    return dataclasses.replace(
        RECIPE,
        parallelism=dataclasses.replace(RECIPE.parallelism, num_devices=num_devices),
        training=dataclasses.replace(RECIPE.training, validation_interval=0),
        compile=dataclasses.replace(RECIPE.compile, cache_folder=""),
    )


def _inputs(num_batches: int) -> tuple[dict[str, np.ndarray], list[Batch]]:
    """The recipe's initial weights and first batches."""
    from titan.train.build import build
    from titan.train.data import open_data
    from titan.train.runtime_xla import XlaRuntime
    from titan.train.state import PARAMS

    runtime = XlaRuntime(_bench_config(1))
    run = build(_bench_config(1), runtime)
    data = open_data(run.config, process_index=runtime.process_index, process_count=runtime.process_count)
    weights = {
        name.removeprefix(PARAMS): np.array(array)
        for name, array in run.initial_state().items()
        if name.startswith(PARAMS)
    }
    return weights, [next(data.train) for _ in range(num_batches)]


def _start_workers(weights: Mapping[str, np.ndarray], batch: Batch) -> dict[str, Worker]:
    one, four = _bench_config(1), _bench_config(_VIRTUAL_DEVICES)
    return {
        "titan_w1": Worker(_TitanTrainer, one),
        "jax_w1": Worker(_jax_trainer, one, weights, batch),
        "eager_w1": Worker(_torch_trainer, one, weights, False),
        "compile_w1": Worker(_torch_trainer, one, weights, True),
        "titan_w4": Worker(_TitanTrainer, four),
        "jax_w4": Worker(_jax_trainer, four, weights, batch),
    }


def _measure(workers: Mapping[str, Worker], batches: Sequence[Batch]) -> dict[str, list[Turn]]:
    from titan.train.lr_schedule import learning_rate

    names = list(workers)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    order = random.Random(0)
    for index, batch in enumerate(batches):
        rate = learning_rate(index, RECIPE.lr_schedule, RECIPE.optimizer, RECIPE.training.steps)
        # Shuffled: the turn after another's is slower or faster by what that one left in caches and free memory.
        for name in order.sample(names, len(names)):
            time.sleep(_PAUSE_SECONDS)
            turns[name].append(workers[name].step(batch, rate))
        print(
            f"step {index + 1}/{len(batches)}  "
            + "  ".join(f"{name} {turns[name][-1].seconds:.3f} s {turns[name][-1].result:.6f}" for name in names),
            flush=True,
        )
    return turns


def result(turns: Mapping[str, Sequence[Turn]], warmup_rounds: int) -> dict[str, float]:
    """The numbers of the `RESULT` line from each contender's turns; the warm-up's count for the losses only."""
    seconds = {name: [turn.seconds for turn in of_one[warmup_rounds:]] for name, of_one in turns.items()}
    numbers: dict[str, float] = {}
    for ratio, (ours, peer) in _RATIOS.items():
        quartiles = statistics.quantiles([b / a for a, b in zip(seconds[ours], seconds[peer])], n=4, method="inclusive")
        numbers |= {ratio: quartiles[1], f"{ratio}_q1": quartiles[0], f"{ratio}_q3": quartiles[2]}
    baseline = [turn.result for turn in turns[_BASELINE]]
    numbers["max_loss_diff"] = max(
        abs(turn.result - loss) for of_one in turns.values() for turn, loss in zip(of_one, baseline, strict=True)
    )
    for name, of_one in turns.items():
        numbers[f"{name}_step_s"] = statistics.median(seconds[name])
        numbers[f"{name}_cpu_s"] = statistics.median(turn.cpu_seconds for turn in of_one[warmup_rounds:])
    numbers |= {"steps": len(baseline), "timed_steps": len(seconds[_BASELINE])}
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="Timed steps of each contender, after two for warm-up.")
    steps = parser.parse_args().steps
    if steps < 8:
        parser.error(f"--steps: {steps} are too few for medians and for the losses of ten steps; give at least 8")
    set_environment()
    rounds = steps + _WARMUP_ROUNDS
    weights, batches = _inputs(rounds)
    workers = _start_workers(weights, batches[0])
    try:
        turns = _measure(workers, batches)
    finally:
        for worker in workers.values():
            worker.close()
    print("RESULT " + json.dumps({name: round(value, 9) for name, value in result(turns, _WARMUP_ROUNDS).items()}))


if __name__ == "__main__":
    main()
