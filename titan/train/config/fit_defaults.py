"""Defaults that give way to what a user asks for: a default never makes a flag that was given wrong."""

from collections.abc import Sequence, Set
from typing import Any

from titan.core.config.tree import replace_leaves
from titan.train.config.run import Config


def fit_defaults(config: Config, given: Set[str]) -> tuple[Config, Sequence[str]]:
    """Lowers defaults that do not fit what the command line sets.

    Args:
      config: with the flags applied, not validated.
      given: paths of the leaves that the command line sets; these are left alone.

    Returns:
      The configuration to use, and a line for each leaf that was changed.
    """
    changes: dict[str, tuple[Any, Any, str]] = {}

    def lower(path: str, now: int, most: int, because: str) -> None:
        if path not in given and now > most >= 0:
            changes[path] = (now, most, because)

    steps, schedule, profiler = config.training.steps, config.lr_schedule, config.profiler
    of_steps = f"training.steps={steps}"
    if "training.steps" in given:
        # As large a part of the run as a short run can bear: the rate is to fall, too.
        lower("lr_schedule.warmup_steps", schedule.warmup_steps, max(steps // 2, 1), of_steps)
        warmup = changes.get("lr_schedule.warmup_steps", (0, schedule.warmup_steps))[1]
        if schedule.kind == "constant":
            lower("lr_schedule.decay_steps", schedule.decay_steps, steps - warmup, of_steps)
    if profiler.enable:
        if "profiler.num_steps" not in given:
            lower("profiler.num_steps", profiler.num_steps, steps, of_steps)
        num_steps = changes.get("profiler.num_steps", (0, profiler.num_steps))[1]
        lower("profiler.start_step", profiler.start_step, steps - num_steps, of_steps)
    num_token_ids = config.model.num_token_ids()
    if config.tokenizer is not None and num_token_ids is not None and not config.tokenizer.path:
        lower("tokenizer.vocab_size", config.tokenizer.vocab_size, num_token_ids, f"model.vocab_size={num_token_ids}")
    if not changes:
        return config, ()
    fitted = replace_leaves(config, {path: new for path, (_, new, _) in changes.items()})
    return fitted, [
        f"--{path}: the default of {old} is lowered to {new}, for {because}"
        for path, (old, new, because) in changes.items()
    ]
