"""titan's captured training step against Hugging Face's own, eager and under torch.compile, on CPU.

    ./bazelw run //tools/bench:hf_parity -- [--families=llama,qwen3,qwen3_moe] [--steps=8]

For each family the debug recipe's model, scaled to about 100M parameters, trains from the same weights on the same rows
of real text, each row one document, in float32 on one device; each contender in a process of its own, in turns of one
step in shuffled order. All keep the memory that a step frees for the next one, as in a loop of nothing but steps. The
last line is `RESULT {json}`:

    FAMILY_vs_eager         titan's tokens per second / those of Transformers, eager
    FAMILY_vs_compile       titan's tokens per second / those of Transformers under torch.compile
    FAMILY_max_loss_diff    the largest difference of any contender's loss at any step from titan's
    FAMILY_parameters_m     millions of parameters

A ratio is the median over the rounds of the ratio of two step times of one round; `*_q1` and `*_q3` are the quartiles.
`*_step_s` and `*_cpu_s` are medians of a step's wall time and CPU time.
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from titan.train.config.kernels import GroupedMatmulConfig
from titan.train.config.run import Config
from titan.train.loop.lr_schedule import learning_rate
from titan.train.recipes import qwen3_debug, qwen3_moe_debug
from tools.bench.interleaved import WARMUP_ROUNDS, max_difference, medians, ratios, take_turns
from tools.bench.titan_trainer import TitanTrainer, on_devices
from tools.bench.worker import Contender, Worker, set_environment

_BATCH_SIZE, _SEQUENCE_LENGTH = 4, 256
_WIDTH = {"dim": 768, "num_heads": 12, "num_kv_heads": 4, "head_dim": 64}


def _scaled(recipe: Config, *, flags: Mapping[str, Any] | None = None, **sizes: int) -> Config:
    training = dataclasses.replace(recipe.training, batch_size=_BATCH_SIZE, sequence_length=_SEQUENCE_LENGTH)
    model = dataclasses.replace(recipe.model, **_WIDTH, **sizes)
    # Deeper models than the recipe's rate is for; the losses are to fall, so that differences would show.
    optimizer = dataclasses.replace(recipe.optimizer, learning_rate=5e-4)
    return dataclasses.replace(recipe, model=model, training=training, optimizer=optimizer, **(flags or {}))


CASES = {
    "llama": _scaled(Config(), num_layers=14, ffn_dim=2048),
    "qwen3": _scaled(qwen3_debug.RECIPE, num_layers=14, ffn_dim=2048),
    "qwen3_moe": _scaled(
        qwen3_moe_debug.RECIPE,
        flags={"grouped_matmul": GroupedMatmulConfig(enable=True)},
        num_layers=8,
        num_experts=16,
        num_active_experts=4,
        expert_ffn_dim=256,
    ),
}
"""Family to the run that is measured."""


def hf_trainer(folder: str, config: Config, compiled: bool) -> Contender:
    """The peer; made in its worker."""
    from tools.bench.hf_trainer import HfTrainer

    return HfTrainer(folder, config.optimizer, config.training.max_grad_norm, compiled=compiled)


def one_document(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The batch with each row as one document: Transformers knows no documents within a row."""
    tokens = batch["tokens"]
    labels = np.concatenate([tokens[:, 1:], np.full_like(tokens[:, :1], -100)], axis=1)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=tokens.dtype), tokens.shape).copy()
    return {"tokens": tokens, "labels": labels, "positions": positions, "segment_ids": np.ones_like(tokens)}


def _inputs(config: Config, folder: str, num_batches: int) -> tuple[int, list[tuple[Any, ...]]]:
    """Writes the initial weights; returns the number of parameters and the arguments of each round's steps."""
    import torch

    from titan.train.inputs.data import open_data

    trainer = TitanTrainer(config)
    weights = {name: torch.from_numpy(array) for name, array in trainer.parameters().items()}
    config.model.hf().save_hf(weights, config.model, folder)
    train = open_data(config, process_index=0, process_count=1).train
    rates = [learning_rate(i, config.lr_schedule, config.optimizer, config.training.steps) for i in range(num_batches)]
    rounds = [(one_document(next(train)), rate) for rate in rates]
    return sum(weight.numel() for weight in weights.values()), rounds


def measure(config: Config, num_steps: int) -> dict[str, float]:
    """One family's numbers, named as in the `RESULT` line without the family."""
    config = on_devices(config, 1)
    with tempfile.TemporaryDirectory() as folder:
        num_parameters, rounds = _inputs(config, folder, num_steps + WARMUP_ROUNDS)
        workers = {
            "titan": Worker(TitanTrainer, config, keep_freed_memory=True),
            "eager": Worker(hf_trainer, folder, config, False, keep_freed_memory=True),
            "compile": Worker(hf_trainer, folder, config, True, keep_freed_memory=True),
        }
        try:
            turns = take_turns(workers, rounds)
        finally:
            for worker in workers.values():
                worker.close()
    return {
        **ratios(turns, {f"vs_{peer}": ("titan", peer) for peer in ("eager", "compile")}),
        "max_loss_diff": max_difference(turns, "titan"),
        "parameters_m": num_parameters / 1e6,
        **medians(turns),
    }


def main() -> None:
    """Runs the program on the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(CASES), help="Families, separated by commas.")
    parser.add_argument("--steps", type=int, default=8, help="Timed steps of each contender, after two for warm-up.")
    arguments = parser.parse_args()
    families = arguments.families.split(",")
    if unknown := sorted(set(families) - set(CASES)):
        parser.error(f"--families: {unknown[0]!r} is unknown; give some of {', '.join(CASES)}")
    if arguments.steps < 2:
        parser.error(f"--steps: {arguments.steps} are too few for quartiles; give at least 2")
    set_environment(keep_freed_memory=True)
    numbers: dict[str, float] = {}
    for family in families:
        print(f"{family}:", flush=True)
        measured = measure(CASES[family], arguments.steps)
        numbers |= {f"{family}_{name}": round(value, 6) for name, value in measured.items()}
    print("RESULT " + json.dumps(numbers))


if __name__ == "__main__":
    main()
