"""The sections of the configuration that are training itself: its length, its optimizer, its learning rate."""

import dataclasses

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError
from titan.train.optimizers.registry import optimizer_names


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Length of the run, size of the batch, seed, clipping, validation."""

    steps: int = option(300, "Optimizer steps of the whole run, those before a resume included.", minimum=1)
    batch_size: int = option(16, "Sequences in one optimizer step, over all devices and microbatches.", minimum=1)
    microbatches: int = option(1, "Parts of a batch whose gradients are accumulated, one after the other.", minimum=1)
    sequence_length: int = option(256, "Tokens in one packed sequence.", minimum=2)
    seed: int = option(0, "Seed of the initial weights.", minimum=0, maximum=2**31 - 1)
    max_grad_norm: float = option(
        1.0, "Global gradient norm above which gradients are scaled down. 0: no clipping.", minimum=0
    )
    validation_interval: int = option(100, "Steps between two validations. 0: no validation.", minimum=0)
    validation_batches: int = option(4, "The most batches in one validation.", minimum=1)

    def validate(self) -> None:
        """Raises ConfigError unless microbatches divide the batch."""
        if self.batch_size % self.microbatches:
            raise ConfigError(
                "training.batch_size",
                f"{self.batch_size} is not a multiple of training.microbatches={self.microbatches}",
                f"give a multiple, e.g. {next_multiple(self.batch_size, self.microbatches)}",
            )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and AdamW's settings; others may have a section of their own."""

    name: str = option("adamw", "The optimizer.", choices=optimizer_names)
    learning_rate: float = option(4e-3, "Peak learning rate; see lr_schedule for its course.", minimum=0)
    beta1: float = option(0.9, "Decay per step of the mean of gradients; below 1.", minimum=0, maximum=1)
    beta2: float = option(0.95, "Decay per step of the mean of squared gradients; below 1.", minimum=0, maximum=1)
    epsilon: float = option(1e-8, "Added to the root of the second moment.", minimum=0)
    weight_decay: float = option(0.1, "Decoupled weight decay, as a multiple of the learning rate.", minimum=0)

    def validate(self) -> None:
        """Raises ConfigError for a beta of 1, whose bias correction would divide by zero."""
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1:
                raise ConfigError(
                    f"optimizer.{name}", "1 would never forget a gradient", "give a number below 1, e.g. 0.95"
                )


@dataclasses.dataclass(frozen=True)
class LrScheduleConfig:
    """Learning rate by step: linear warm-up to the peak, then a decay."""

    kind: str = option(
        "cosine",
        "Course after the warm-up: cosine or linear decay, or constant with, if decay_steps is set, a linear decay at "
        "the end (WSD).",
        choices=("cosine", "linear", "constant"),
    )
    warmup_steps: int = option(20, "Steps of linear warm-up, the last of which has the peak rate. 0: none.", minimum=0)
    decay_steps: int = option(
        0,
        "Steps of decay. 0: cosine and linear decay over the rest of the run, constant never. For constant these are "
        "the last steps of the run.",
        minimum=0,
    )
    min_ratio: float = option(0.1, "The rate after the decay, as a fraction of the peak.", minimum=0, maximum=1)


def next_multiple(number: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `number`."""
    return -(-number // unit) * unit
