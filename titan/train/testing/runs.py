"""Runs of recipes for tests, mostly of llama3_debug: in processes of their own, so small that a start takes seconds."""

import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

TINY_FLAGS = (
    "--model.num_layers=1",
    "--model.dim=64",
    "--model.num_heads=2",
    "--model.num_kv_heads=1",
    "--model.ffn_dim=128",
    "--model.vocab_size=512",
    "--tokenizer.vocab_size=512",
    "--training.sequence_length=64",
    "--training.batch_size=4",
    "--training.validation_interval=0",
    # The rate of a step does not depend on the length of the run, which tests may then choose late.
    "--lr_schedule.kind=constant",
    "--lr_schedule.warmup_steps=2",
)
ENDLESS = "--training.steps=1000000"
# Of flux_debug: two photographs of about 128x128 pixels in a row.
PHOTOGRAPH_FLAGS = (
    "--data.trial_images=photographs",
    "--data.resolution=128",
    "--model.text_length=32",
    "--model.images_per_row=2",
    "--training.sequence_length=192",
)


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
      code: its exit code.
      out: lines of standard output.
      err: lines of standard error, less those that the first run on a corpus says about its caches.
    """

    code: int
    out: list[str]
    err: list[str]


class Workplace:
    """A folder with a corpus, in which runs share the caches of compiled programs, tokens and tokenizers.

    Attributes:
      folder: home of the processes, so that no default path leads elsewhere.
      corpus: JSONL of about 55 rows of 64 tokens, 14 steps of `TINY_FLAGS` an epoch.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.corpus = folder / "corpus.jsonl"
        draw = random.Random(0)
        words = [f"word{i}" for i in range(100)]
        texts = [" ".join(draw.choices(words, k=draw.choice((3, 20, 60)))) for _ in range(63)]
        self.corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    @property
    def compiled(self) -> list[pathlib.Path]:
        """Files of the compile cache: empty until something has been compiled."""
        return [path for path in (self.folder / ".cache" / "titan" / "compile").rglob("*") if path.is_file()]

    def start(
        self, run: str, *flags: str, defaults: Sequence[str] = TINY_FLAGS, recipe: str = "llama3_debug"
    ) -> subprocess.Popen:
        """Starts a run of the recipe in `folder / run`; `flags` override `defaults`."""
        paths = [f"--data.path={self.corpus}", f"--checkpoint.folder={self.folder / run}"]
        environment = {
            **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
            "HOME": str(self.folder),
            "JAX_PLATFORMS": "cpu",
            "TITAN_PROGRESS_SECONDS": "0",
            # Programs run for a few steps: effort in generating machine code is wasted.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        return subprocess.Popen(
            [sys.executable, "-m", f"titan.train.recipes.{recipe}", *defaults, *paths, *flags],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, run: str, *flags: str, **options: Any) -> Ended:
        """Runs to the end; `options` as for `start`."""
        return wait(self.start(run, *flags, **options))

    def train(self, run: str, *flags: str, **options: Any) -> Ended:
        """Runs to the end and expects success with nothing to complain about; `options` as for `start`."""
        ended = self.run(run, *flags, **options)
        assert ended.code == 0, ended
        assert ended.err == []
        return ended


def wait_for_line(process: subprocess.Popen, beginning: str) -> list[str]:
    """Lines of standard output up to the first that begins so."""
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith(beginning):
            return lines
    raise AssertionError(f"ended before {beginning!r}: {lines} {process.stderr.read()}")


def wait(process: subprocess.Popen, *, timeout: float = 600) -> Ended:
    """Waits for the end, `timeout` seconds at most; reads what has not been read yet."""
    out, err = process.communicate(timeout=timeout)
    about_caches = ("Training a tokenizer", "Tokenising", "Encoding")
    return Ended(
        process.returncode, out.splitlines(), [line for line in err.splitlines() if not line.startswith(about_caches)]
    )


def reported_losses(folder: pathlib.Path) -> dict[int, set[float]]:
    """Step to the training losses that TensorBoard was given for it, exact float32; a step done twice may have two."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    losses: dict[int, set[float]] = {}
    for path in sorted((folder / "tensorboard").iterdir()):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == "loss/train":
                    losses.setdefault(event.step, set()).add(value.simple_value)
    return losses


def checkpoint_steps(folder: pathlib.Path) -> list[int]:
    """Steps of the finished checkpoints, ascending."""
    checkpoints = folder / "checkpoints"
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.exists() else []
    return sorted(int(name) for name in names if name.isdecimal())


def saved_state(folder: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint, read without titan."""
    import jax
    import orbax.checkpoint as ocp

    path = folder / "checkpoints" / str(step) / "arrays"
    with ocp.PyTreeCheckpointer() as checkpointer:
        names = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
        return checkpointer.restore(path, restore_args=as_numpy)


def differing(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """Names of the arrays that are not equal bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]
