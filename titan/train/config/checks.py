"""What the sections of a configuration ask of one another. No torch; touches no device."""

from collections.abc import Callable

from titan.core.config.validate import ConfigError
from titan.models.family import ImageModel
from titan.train.config.execution_checks import check_aot, check_execution, check_split
from titan.train.config.parallelism_checks import (
    check_context_parallel,
    check_devices,
    check_expert_parallel,
    check_tensor_parallel,
)
from titan.train.config.run import Config


def _check_name(config: Config) -> None:
    if not config.name or "/" in config.name or config.name in (".", ".."):
        raise ConfigError(
            "name", f"{config.name!r} cannot name a folder", "give a name without slashes, e.g. llama3_debug"
        )


def _check_schedule(config: Config) -> None:
    schedule, steps = config.lr_schedule, config.training.steps
    if schedule.warmup_steps > steps:
        raise ConfigError(
            "lr_schedule.warmup_steps",
            f"{schedule.warmup_steps} are more than training.steps={steps}",
            "give fewer, or train longer",
        )
    if schedule.kind == "constant" and schedule.warmup_steps + schedule.decay_steps > steps:
        raise ConfigError(
            "lr_schedule.decay_steps",
            f"{schedule.decay_steps} and warmup_steps={schedule.warmup_steps} are more than training.steps={steps}",
            "give fewer, or train longer",
        )
    profiler = config.profiler
    if profiler.enable and profiler.start_step + profiler.num_steps > steps:
        raise ConfigError(
            "profiler.start_step",
            f"the profile ends at step {profiler.start_step + profiler.num_steps}, training at training.steps={steps}",
            "start earlier, profile fewer steps (--profiler.num_steps), or train longer",
        )


def _check_family(config: Config) -> None:
    """Finds what a configuration file, or a recipe's author, has put together wrongly, and flags without effect."""
    kind, family = config.model.data_kind, config.model.family
    for flag, kind_of_section in (
        ("data", config.data.kind),
        ("tokenizer", "images" if config.tokenizer is None else "documents"),
        ("sampling", "documents" if config.sampling is None else "images"),
    ):
        if kind_of_section != kind:
            raise ConfigError(
                flag, f"{family} is trained on {kind}, and this section is one for {kind_of_section}", "use its recipe"
            )
    if config.fused_linear_cross_entropy.enable and config.model.num_token_ids() is None:
        raise ConfigError(
            "fused_linear_cross_entropy.enable", f"{family} has no cross-entropy to be fused", "leave it out"
        )
    if config.rope_kernel.enable and not config.model.takes_rope_kernel():
        raise ConfigError(
            "model.rope", "the RoPE kernel takes cosines and sines, and rope_kernel.enable is on", "leave one out"
        )


def _check_sampling(config: Config) -> None:
    if config.sampling is None:
        return
    if config.sampling.interval and not (config.metrics.tensorboard or config.metrics.sinks):
        raise ConfigError(
            "metrics.tensorboard",
            f"images drawn with sampling.interval={config.sampling.interval} go there or to metrics.sinks alone",
            "leave it on, name a sink, or give --sampling.interval=0",
        )
    images = config.model.images()
    if images is not None and not images.guidance_embedding:
        for section in ("data", "sampling"):
            value, default = getattr(config, section).guidance, type(getattr(config, section)).guidance
            if value != default:
                raise ConfigError(
                    f"{section}.guidance",
                    f"{value} has no effect unless model.guidance_embedding is true",
                    f"leave it at {default}, or see sampling.classifier_free_guidance",
                )


def _check_sizes(config: Config) -> None:
    config.model.batch_tensors(config.training.sequence_length)
    images = config.model.images()
    if images is not None:
        _check_image_sizes(config.data.resolution, images, config.training.sequence_length)
    elif not config.tokenizer.path and config.tokenizer.vocab_size > config.model.num_token_ids():
        raise ConfigError(
            "tokenizer.vocab_size",
            f"{config.tokenizer.vocab_size} token ids do not fit model.vocab_size={config.model.num_token_ids()}",
            "give a smaller vocabulary, or a larger --model.vocab_size",
        )


def _check_image_sizes(resolution: int, images: ImageModel, sequence_length: int) -> None:
    patch = images.patch_pixels
    if resolution % patch:
        raise ConfigError(
            "data.resolution",
            f"{resolution} is no multiple of {patch} pixels, which are one token",
            f"give {max(resolution // patch, 1) * patch}",
        )
    image_length, needed = images.image_length(sequence_length), (resolution // patch) ** 2
    if needed > image_length:
        raise ConfigError(
            "training.sequence_length",
            f"{sequence_length} leaves {image_length} tokens for images, and one of data.resolution={resolution} has "
            f"{needed}",
            f"give {sequence_length + needed - image_length}, or a lower resolution",
        )


def _check_experts(config: Config) -> None:
    flags = [
        *(["grouped_matmul.enable"] if config.grouped_matmul.enable else ()),
        *(f"expert_balance.{name}" for name in ("bias", "auxiliary_loss") if getattr(config.expert_balance, name)),
    ]
    if flags and config.model.experts() is None:
        raise ConfigError(
            flags[0],
            f"{config.model.family} has no experts",
            "leave it out, or train a mixture of experts such as qwen3_moe_debug",
        )


CHECKS: tuple[Callable[[Config], None], ...] = (
    _check_name,
    _check_schedule,
    check_execution,
    check_split,
    _check_family,
    _check_sampling,
    _check_sizes,
    _check_experts,
    check_context_parallel,
    check_tensor_parallel,
    check_expert_parallel,
    check_aot,
    check_devices,
)
"""All checks, in the order in which their mistakes are reported."""
