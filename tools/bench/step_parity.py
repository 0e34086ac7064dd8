"""Step time of titan's captured training step against hand-written JAX, PyTorch eager and torch.compile.

    ./bazelw run //tools/bench:step_parity

All train the small Llama 3 of the default configuration from the same initial weights on the same batches of real text,
each in a process of its own, in turns of one step in shuffled order. The last line is `RESULT {json}`:

    vs_jax_w1, vs_jax_w4   titan's throughput / that of `jax_llama3.py`, on one device and with FSDP over four virtual
    vs_eager_w1            titan's throughput / that of PyTorch eager, on one device
    vs_compile_w1          titan's throughput / that of torch.compile, on one device
    max_loss_diff          the largest difference of any contender's loss at any step from titan's on one device

A ratio is the median over the rounds of the ratio of two step times of one round, so that a load on the machine that
lasts longer than a round falls on both; `*_q1` and `*_q3` are the quartiles. `*_step_s` and `*_cpu_s` are medians of a
step's wall time and CPU time.
"""

import argparse
import json
from collections.abc import Mapping

import numpy as np

from titan.train.config.run import Config
from titan.train.loop.lr_schedule import learning_rate
from tools.bench.interleaved import WARMUP_ROUNDS, Turns, max_difference, medians, ratios, take_turns
from tools.bench.llama3_hyperparameters import llama3_hyperparameters
from tools.bench.titan_trainer import TitanTrainer, on_devices
from tools.bench.worker import Contender, Worker, set_environment

Batch = Mapping[str, np.ndarray]

_VIRTUAL_DEVICES = 4
_BASELINE = "titan_w1"
_RATIOS = {
    "vs_jax_w1": ("titan_w1", "jax_w1"),
    "vs_jax_w4": ("titan_w4", "jax_w4"),
    "vs_eager_w1": ("titan_w1", "eager_w1"),
    "vs_compile_w1": ("titan_w1", "compile_w1"),
}


def _jax_trainer(config: Config, weights: Mapping[str, np.ndarray], batch: Batch) -> Contender:
    from titan.train.runtime.xla import XlaRuntime
    from tools.bench.jax_llama3 import Hyperparameters, JaxTrainer

    runtime = XlaRuntime(config)  # starts JAX with the devices and threads that titan has
    return JaxTrainer(weights, batch, Hyperparameters(**llama3_hyperparameters(config)), runtime.num_devices)


def _torch_trainer(config: Config, weights: Mapping[str, np.ndarray], compiled: bool) -> Contender:
    from tools.bench.torch_llama3 import TorchTrainer

    return TorchTrainer(weights, config, compiled=compiled)


def _inputs(num_batches: int) -> tuple[dict[str, np.ndarray], list[Batch]]:
    """The recipe's initial weights and first batches."""
    from titan.train.inputs.data import open_data

    config = on_devices(Config(), 1)
    batches = open_data(config, process_index=0, process_count=1).train
    return TitanTrainer(config).parameters(), [next(batches) for _ in range(num_batches)]


def _start_workers(weights: Mapping[str, np.ndarray], batch: Batch) -> dict[str, Worker]:
    one, four = on_devices(Config(), 1), on_devices(Config(), _VIRTUAL_DEVICES)
    return {
        "titan_w1": Worker(TitanTrainer, one),
        "jax_w1": Worker(_jax_trainer, one, weights, batch),
        "eager_w1": Worker(_torch_trainer, one, weights, False),
        "compile_w1": Worker(_torch_trainer, one, weights, True),
        "titan_w4": Worker(TitanTrainer, four),
        "jax_w4": Worker(_jax_trainer, four, weights, batch),
    }


def result(turns: Turns) -> dict[str, float]:
    """The numbers of the `RESULT` line from each contender's turns; the warm-up's count for the losses only."""
    numbers = ratios(turns, _RATIOS)
    numbers["max_loss_diff"] = max_difference(turns, _BASELINE)
    numbers |= medians(turns)
    rounds = len(turns[_BASELINE])
    return numbers | {"steps": rounds, "timed_steps": rounds - WARMUP_ROUNDS}


def main() -> None:
    """Runs the program on the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="Timed steps of each contender, after two for warm-up.")
    steps = parser.parse_args().steps
    if steps < 8:
        parser.error(f"--steps: {steps} are too few for medians and for the losses of ten steps; give at least 8")
    set_environment()
    weights, batches = _inputs(steps + WARMUP_ROUNDS)
    rates = [
        learning_rate(index, Config().lr_schedule, Config().optimizer, Config().training.steps)
        for index in range(len(batches))
    ]
    workers = _start_workers(weights, batches[0])
    try:
        turns = take_turns(workers, list(zip(batches, rates, strict=True)))
    finally:
        for worker in workers.values():
            worker.close()
    print("RESULT " + json.dumps({name: round(value, 9) for name, value in result(turns).items()}))


if __name__ == "__main__":
    main()
