"""What each kind of parallelism asks of the rest of a `titan.train.config.run.Config`, which calls these. No torch."""

from typing import Any

from titan.core.config.validate import ConfigError
from titan.models.flux.config import FluxConfig


def check_context_parallel(config: Any) -> None:
    """Raises ConfigError where sequences cannot be split over so many devices."""
    size, length = config.parallelism.context_parallel, config.training.sequence_length
    if size == 1:
        return
    if isinstance(config.model, FluxConfig):
        _check_sets(config.model, length, size)
    elif length % (2 * size):
        raise ConfigError(
            "training.sequence_length",
            f"{length} tokens cannot be split into two chunks for each of context_parallel={size} devices",
            f"give a multiple of {2 * size}, e.g. {-(-length // (2 * size)) * 2 * size}",
        )
    kernel = config.splash_attention_kernel
    if kernel.use_splash_attention_kernel and kernel.implementation == "tokamax":
        raise ConfigError(
            "splash_attention_kernel.implementation",
            "tokamax's kernel takes whole sequences, which context_parallel splits",
            "give auto, jax or xla",
        )


def _check_sets(model: FluxConfig, length: int, size: int) -> None:
    """Raises ConfigError where text and pictures of a row of so many tokens cannot both be split over devices."""
    image_length, num_texts = model.image_length(length), model.pictures_per_row
    if num_texts * model.text_length % size:
        raise ConfigError(
            "model.text_length",
            f"{num_texts} x {model.text_length} tokens of text cannot be split over context_parallel={size}",
            f"give a multiple of {size}",
        )
    if image_length % size:
        raise ConfigError(
            "training.sequence_length",
            f"the {image_length} of {length} tokens that are for pictures cannot be split over context_parallel={size}",
            f"give {length + -image_length % size}",
        )


def check_tensor_parallel(config: Any) -> None:
    """Raises ConfigError where a model cannot be split over so many devices."""
    parallelism, size = config.parallelism, config.parallelism.tensor_parallel
    if size == 1:
        return
    if not hasattr(config.model, "tensor_parallel_plan"):
        raise ConfigError(
            "parallelism.tensor_parallel",
            f"there is no plan to split a {type(config.model).__name__.removesuffix('Config')}",
            "leave it at 1",
        )
    plan = config.model.tensor_parallel_plan()
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


def check_expert_parallel(config: Any) -> None:
    """Raises ConfigError where a model has no experts that could be spread over so many devices."""
    size = config.parallelism.expert_parallel
    if size == 1:
        return
    num_experts = getattr(config.model, "num_experts", 0)
    if not num_experts:
        raise ConfigError(
            "parallelism.expert_parallel",
            f"{type(config.model).__name__.removesuffix('Config')} has no experts",
            "leave it at 1, or train a mixture of experts such as qwen3_moe_debug",
        )
    if num_experts % size:
        raise ConfigError(
            "parallelism.expert_parallel",
            f"{size} does not divide model.num_experts={num_experts}",
            "give a divisor of it",
        )
