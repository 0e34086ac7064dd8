"""What to change of a step that does not fit into a device's memory, with an estimate of what it would then need."""

import dataclasses

from titan.graph.aot.memory import SAVED, TEMPORARIES
from titan.graph.aot.report import Memory
from titan.train.config.run import Config


@dataclasses.dataclass(frozen=True)
class _Change:
    text: str
    needed: int | None = None  # None: no estimate


def advice(config: Config, memory: Memory) -> tuple[str, ...]:
    """One line for each change: first those that should make it fit, the smallest first, then those that help.

    The estimates take saved activations and temporaries as proportional to the tokens that a device has at a time,
    parameters and optimizer state as inversely proportional to the devices that they are sharded over, and of what is
    saved they take layer inputs to remain where those are saved alone.
    """
    changes = [
        *_fewer_tokens(config, memory),
        *_keep_less(config, memory),
        *_kernels(config),
        *_more_devices(config, memory),
    ]
    fitting = [change for change in changes if change.needed is not None and change.needed <= memory.capacity]
    lines = []
    for change in [*fitting, *(change for change in changes if change not in fitting)]:
        estimate = ""
        if change.needed is not None:
            alone = "" if change in fitting else ", not enough alone"
            estimate = f" (about {change.needed / 2**30:.1f} GiB{alone})"
        lines.append(change.text + estimate)
    return tuple(lines)


def _by_tokens(memory: Memory, part: int) -> int:
    """Bytes with one `part`-th of the tokens at a time."""
    activations = sum(memory.at_peak.get(kind, 0) for kind in (SAVED, TEMPORARIES))
    return memory.needed - activations + activations // part


def _fewer_tokens(config: Config, memory: Memory) -> list[_Change]:
    training, num_devices = config.training, config.parallelism.num_devices
    sequences = training.batch_size // (training.microbatches * num_devices)
    changes = []
    parts = [part for part in range(2, sequences + 1) if sequences % part == 0]
    if parts:
        part = next((part for part in parts if _by_tokens(memory, part) <= memory.capacity), parts[-1])
        changes.append(
            _Change(
                f"--training.microbatches={training.microbatches * part}: {sequences // part} rather than {sequences} "
                "sequences at a time on a device",
                _by_tokens(memory, part),
            )
        )
    part = next((part for part in (2, 4, 8) if _by_tokens(memory, part) <= memory.capacity), 8)
    has_sequences = config.model.data_kind == "documents"  # of images all tokens are needed
    if has_sequences and training.sequence_length % part == 0 and (not parts or changes[0].needed > memory.capacity):
        changes.append(
            _Change(
                f"--training.sequence_length={training.sequence_length // part}: shorter sequences",
                _by_tokens(memory, part),
            )
        )
    return changes


def _keep_less(config: Config, memory: Memory) -> list[_Change]:
    saved = memory.at_peak.get(SAVED, 0)
    policy = config.compile.memory_policy.partition(",")[0]
    if not saved or policy == "offload":
        return []
    tokens = config.training.batch_size * config.training.sequence_length // config.training.microbatches
    itemsize = 2 if config.parallelism.gather_dtype == "bfloat16" else 4
    inputs = config.model.num_layers * config.model.dim * itemsize * tokens // config.parallelism.num_devices
    changes = []
    if policy != "full":
        changes.append(
            _Change(
                "--compile.memory_policy=full: the backward pass computes each layer again from its input",
                memory.needed - saved + min(inputs, saved),
            )
        )
    changes.append(
        _Change(
            "--compile.memory_policy=offload: the same, and the layers' inputs wait in host memory",
            memory.needed - saved,
        )
    )
    return changes


def _kernels(config: Config) -> list[_Change]:
    changes = []
    if not config.parallelism.gather_dtype:
        changes.append(_Change("--parallelism.gather_dtype=bfloat16: parameters are used at half the size"))
    if not config.splash_attention_kernel.enable:
        changes.append(_Change("--splash_attention_kernel.enable: no matrix of all scores"))
    if config.model.loss_module == "cross_entropy" and not config.fused_linear_cross_entropy.enable:
        changes.append(_Change("--fused_linear_cross_entropy.enable: never all logits at a time"))
    return changes


def _more_devices(config: Config, memory: Memory) -> list[_Change]:
    state = memory.parameters + memory.optimizer_state
    changes = []
    if config.parallelism.data_parallel_replicate > config.tpu_slice.num_slices:
        part = config.parallelism.data_parallel_replicate // config.tpu_slice.num_slices
        changes.append(
            _Change(
                f"--parallelism.data_parallel_replicate={config.tpu_slice.num_slices}: parameters and optimizer state "
                "sharded over all devices of a slice",
                memory.needed - state + state // part,
            )
        )
    part = next((part for part in (2, 4, 8, 16) if memory.needed - state + state // part <= memory.capacity), 2)
    changes.append(
        _Change(
            f"a --hardware with {part} times the chips, and {part} times the batch: parameters and optimizer state "
            "sharded over more devices",
            memory.needed - state + state // part,
        )
    )
    return changes
