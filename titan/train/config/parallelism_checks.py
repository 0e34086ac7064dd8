"""What each kind of parallelism asks of the rest of the configuration. No torch."""

from typing import Any

from titan.core.config.validate import ConfigError
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.run import Config
from titan.train.config.training import next_multiple


def check_context_parallel(config: Config) -> None:
    """Raises ConfigError where sequences cannot be split over so many devices."""
    size = config.parallelism.context_parallel
    if size == 1:
        return
    config.model.check_context_parallel(config.training.sequence_length, size)
    kernel = config.splash_attention_kernel
    if kernel.enable and kernel.implementation == "tokamax":
        raise ConfigError(
            "splash_attention_kernel.implementation",
            "tokamax's kernel takes whole sequences, which context_parallel splits",
            "give auto, jax or xla",
        )


def check_tensor_parallel(config: Config) -> None:
    """Raises ConfigError where a model cannot be split over so many devices."""
    parallelism, size = config.parallelism, config.parallelism.tensor_parallel
    if size == 1:
        return
    plan = config.model.tensor_parallel_plan()
    if plan is None:
        raise ConfigError(
            "parallelism.tensor_parallel", f"there is no plan to split a {config.model.family}", "leave it at 1"
        )
    for name in plan.sizes:
        if getattr(config.model, name) % size:
            raise ConfigError(
                "parallelism.tensor_parallel",
                f"{size} does not divide model.{name}={getattr(config.model, name)}",
                "give a divisor of it",
            )
    if plan.shared is not None:
        _check_shared(plan.shared, size)
    parts = size * parallelism.context_parallel
    if parallelism.sequence_parallel and plan.splits_tokens and config.training.sequence_length % parts:
        raise ConfigError(
            "training.sequence_length",
            f"{config.training.sequence_length} tokens cannot be split over tensor_parallel={size}"
            + (f" x context_parallel={parallelism.context_parallel}" if parts > size else ""),
            f"give a multiple of {parts}, or --parallelism.sequence_parallel=false",
        )
    if config.fused_linear_cross_entropy.enable and config.fused_linear_cross_entropy.gradients == "forward":
        raise ConfigError(
            "fused_linear_cross_entropy.gradients",
            "forward needs the logits of the whole vocabulary at once, which tensor_parallel splits",
            "leave it at backward",
        )


def _check_shared(shared: Any, size: int) -> None:
    """Raises ConfigError where devices can neither have some of these parts each nor share one, in equal numbers."""
    parts = f"model.{shared.name}={shared.num_parts}"
    if shared.num_parts % size and size % shared.num_parts:
        raise ConfigError(
            "parallelism.tensor_parallel",
            f"{size} neither divides {parts} nor is a multiple of it",
            "give a divisor or a multiple of it",
        )
    sharers = size // shared.num_parts
    if sharers and shared.part_size % sharers:
        raise ConfigError(
            "parallelism.tensor_parallel",
            f"{size} devices for {parts} are {sharers} for each, which do not divide its {shared.part_size} elements",
            f"give {shared.num_parts} times a divisor of {shared.part_size}",
        )


def check_expert_parallel(config: Config) -> None:
    """Raises ConfigError where a model has no experts that could be spread over so many devices."""
    size = config.parallelism.expert_parallel
    if size == 1:
        return
    experts = config.model.experts()
    if experts is None:
        raise ConfigError(
            "parallelism.expert_parallel",
            f"{config.model.family} has no experts",
            "leave it at 1, or train a mixture of experts such as qwen3_moe_debug",
        )
    num_experts = experts.num_experts
    if num_experts % size:
        raise ConfigError(
            "parallelism.expert_parallel",
            f"{size} does not divide model.num_experts={num_experts}",
            "give a divisor of it",
        )


def check_batch(config: Config, parallelism: ParallelismConfig) -> None:
    """Raises ConfigError where the devices and microbatches do not divide the batch."""
    num_shares, microbatches = parallelism.num_batch_shares, config.training.microbatches
    unit = num_shares * microbatches
    if config.training.batch_size % unit:
        shares = "devices" if num_shares == parallelism.num_devices else "groups of devices with sequences of their own"
        raise ConfigError(
            "training.batch_size",
            f"{config.training.batch_size} is not a multiple of {num_shares} {shares} "
            f"times {microbatches} microbatches",
            f"give a multiple of {unit}, e.g. {next_multiple(config.training.batch_size, unit)}",
        )


def check_devices(config: Config) -> None:
    """Raises ConfigError where a stated number of devices does not suit the mesh or the batch."""
    if config.parallelism.num_devices:
        check_batch(config, config.parallelism.resolve(config.parallelism.num_devices))
