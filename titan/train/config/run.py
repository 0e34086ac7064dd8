"""The configuration of one training run: the root of the tree, and the sections that belong to training itself.

Imports neither torch nor jax, so that flags are parsed and checked before anything heavy is loaded.
"""

import dataclasses

from titan.core.checkpoint import CheckpointConfig
from titan.core.config.tree import option
from titan.core.config.validate import ConfigError
from titan.core.data.config import DataConfig, TokenizerConfig
from titan.core.data.images.config import PATCH_PIXELS, ImageDataConfig
from titan.core.metrics import MetricsConfig
from titan.core.profiler import ProfilerConfig
from titan.core.tpu_flags import tpu_compiler_options
from titan.core.tpu_slice import TpuSlice, parse_tpu_slice
from titan.models.flux.config import FluxConfig
from titan.models.llama3.config import Llama3Config
from titan.models.muse_glimmer.config import MuseGlimmerConfig
from titan.models.qwen3.config import Qwen3Config, Qwen3MoeConfig
from titan.train.config.checks import check_context_parallel, check_expert_parallel, check_tensor_parallel
from titan.train.config.compile import AotConfig, CompileConfig, TpuConfig
from titan.train.config.expert_balance import ExpertBalanceConfig
from titan.train.config.kernels import FusedLinearCrossEntropyConfig, RopeKernelConfig, SplashAttentionKernelConfig
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.processes import DistributedConfig
from titan.train.config.sampling import SamplingConfig


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
                f"give a multiple, e.g. {_next_multiple(self.batch_size, self.microbatches)}",
            )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW."""

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


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run. The defaults are the recipe llama3_debug."""

    name: str = option(
        "llama3_debug", "Name of the run; its files lie below it unless checkpoint.folder says otherwise."
    )
    model: Llama3Config | Qwen3Config | Qwen3MoeConfig | MuseGlimmerConfig | FluxConfig = option(
        Llama3Config(), "Hyperparameters of the model."
    )
    parallelism: ParallelismConfig = option(
        ParallelismConfig(), "Devices, the mesh axes over them, and the dtypes of collectives."
    )
    training: TrainingConfig = option(
        TrainingConfig(), "Length of the run, size of the batch, seed, clipping, validation."
    )
    optimizer: OptimizerConfig = option(OptimizerConfig(), "AdamW.")
    expert_balance: ExpertBalanceConfig = option(
        ExpertBalanceConfig(), "What keeps the experts of a mixture equally busy."
    )
    lr_schedule: LrScheduleConfig = option(LrScheduleConfig(), "Learning rate by step: warm-up, then a decay.")
    data: DataConfig | ImageDataConfig = option(
        DataConfig(), "Documents, or pictures with captions, to train on, and those held out."
    )
    tokenizer: TokenizerConfig | None = option(
        TokenizerConfig(), "A tokenizer to load, or to train on the documents. Not there for pictures."
    )
    sampling: SamplingConfig | None = option(
        None, "Pictures sampled while training. Not there for a model of documents."
    )
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "Where and how often the state is saved.")
    metrics: MetricsConfig = option(MetricsConfig(), "Numbers that are reported while training.")
    profiler: ProfilerConfig = option(ProfilerConfig(), "Trace of a few steps.")
    compile: CompileConfig = option(CompileConfig(), "Compilation, and its cache on disk.")
    tpu_config: TpuConfig = option(TpuConfig(), "Capture of the training step as one graph, and what executes it.")
    splash_attention_kernel: SplashAttentionKernelConfig = option(
        SplashAttentionKernelConfig(), "Splash attention in place of the model's own, and its block sizes."
    )
    fused_linear_cross_entropy: FusedLinearCrossEntropyConfig = option(
        FusedLinearCrossEntropyConfig(), "Head and loss as one op that never holds all logits."
    )
    rope_kernel: RopeKernelConfig = option(RopeKernelConfig(), "Rotary embedding of queries and keys as a kernel.")
    use_grouped_mm: bool = option(
        False, "Experts by grouped matmuls, each row with its own expert's weights, rather than by a loop."
    )
    use_pallas_paired_grouped_mm: bool = option(
        False, "As use_grouped_mm, with gate and up projection as one kernel that reads the rows once."
    )
    grouped_mm_implementation: str = option(
        "auto",
        "Of the grouped matmuls. auto: on TPU Pallas kernels, elsewhere xla. xla: a loop over blocks of rows.",
        choices=("auto", "mosaic", "xla"),
    )
    distributed: DistributedConfig = option(
        DistributedConfig(), "Several processes, as on the hosts of a slice, and how they find one another."
    )
    hardware: str = option(
        "", "TPU slice to compile for with --aot, as v5e-2x2, v5p-2x2x1, v6e-2x4, tpu7x-4x4x8 or 4*tpu7x-8x8x16."
    )
    aot: AotConfig = option(AotConfig(), "Compilation for a TPU slice on a machine without a TPU, in place of a run.")

    @property
    def tpu_slice(self) -> TpuSlice | None:
        """What `hardware` names; None if it is empty. ConfigError if there is no such slice."""
        return parse_tpu_slice(self.hardware) if self.hardware else None

    def validate(self) -> None:
        """Raises ConfigError where sections contradict one another. Touches no device."""
        self._check_name()
        self._check_schedule()
        self._check_execution()
        self._check_split()
        self._check_family()
        self._check_sampling()
        self._check_sizes()
        self._check_experts()
        check_context_parallel(self)
        check_tensor_parallel(self)
        check_expert_parallel(self)
        self._check_aot()
        if self.parallelism.num_devices:
            self._check_batch(self.parallelism.resolve(self.parallelism.num_devices))

    def resolve_devices(self, num_present: int) -> "Config":
        """This configuration for a machine with so many devices: `parallelism` in numbers, the batch checked.

        Raises:
          ConfigError: see `ParallelismConfig.resolve`; or the devices and microbatches do not divide the batch.
        """
        parallelism = self.parallelism.resolve(num_present)
        self._check_batch(parallelism)
        return dataclasses.replace(self, parallelism=parallelism)

    def _check_name(self) -> None:
        if not self.name or "/" in self.name or self.name in (".", ".."):
            raise ConfigError(
                "name", f"{self.name!r} cannot name a folder", "give a name without slashes, e.g. llama3_debug"
            )

    def _check_schedule(self) -> None:
        schedule, steps = self.lr_schedule, self.training.steps
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
        profiler = self.profiler
        if profiler.enable_profiling and profiler.start_step + profiler.num_steps > steps:
            raise ConfigError(
                "profiler.start_step",
                f"the profile ends at step {profiler.start_step + profiler.num_steps}, "
                f"training at training.steps={steps}",
                "start earlier, profile fewer steps (--profiler.num_steps), or train longer",
            )

    def _check_execution(self) -> None:
        tpu_config = self.tpu_config
        is_xla = tpu_config.use_graph_trainer and tpu_config.executor == "xla"
        if self.distributed.is_asked_for:
            if not is_xla:
                raise ConfigError(
                    "distributed",
                    "the torch executor has a process for each of --parallelism.num_devices, or those of torchrun",
                    "leave it out, or use the xla executor",
                )
            if self.aot.enable:
                raise ConfigError("distributed", "one process compiles for all hosts of a slice", "leave it out")
        for section, name in (
            ("compile", "tpu_flag_bundles"),
            ("compile", "tpu_flags"),
            ("aot", "save"),
            ("aot", "load"),
        ):
            if getattr(getattr(self, section), name) and not is_xla:
                raise ConfigError(
                    f"{section}.{name}",
                    "only the xla executor compiles a whole step",
                    "leave it out, or use that executor",
                )
        if self.profiler.enable_profiling and not is_xla:
            raise ConfigError(
                "profiler.enable_profiling",
                "the profiler is JAX's and would not see what PyTorch runs",
                "leave it off, or use the xla executor",
            )
        if tpu_config.use_graph_trainer:
            if tpu_config.executor == "xla" and not self.compile.enable:
                raise ConfigError(
                    "compile.enable",
                    "the xla executor always compiles",
                    "leave it on, or add --tpu_config.executor=torch",
                )
            return
        asked_for = {
            f"tpu_config.{name}": getattr(tpu_config, name)
            for name in ("use_scan_layers", "use_graph_split", "dump_graph", "disable_passes")
        }
        asked_for["compile.memory_policy"] = self.compile.memory_policy != "none"
        for flag, is_asked_for in asked_for.items():
            if is_asked_for:
                raise ConfigError(
                    flag, "there is no graph without the graph trainer", "leave it out, or use the graph trainer"
                )

    def _check_split(self) -> None:
        if not self.tpu_config.use_graph_split:
            return
        for given, problem, cure in (
            (
                self.tpu_config.executor != "xla",
                f"the {self.tpu_config.executor} executor compiles nothing that could be split",
                "leave it out, or use the xla executor",
            ),
            (
                self.tpu_config.use_scan_layers,
                "use_scan_layers is on too, and a loop over layers is one program or one for each turn",
                "add --notpu_config.use_scan_layers, or leave this out",
            ),
            (
                self.aot.save or self.aot.load,
                "a step that is saved is one program",
                "leave it out, or leave out aot.save and aot.load",
            ),
            (
                self.aot.lowering != "titan",
                f"aot.lowering={self.aot.lowering} lowers whole steps alone",
                "give one of the two",
            ),
            (
                self.compile.offload_prefetch != CompileConfig.offload_prefetch,
                f"compile.offload_prefetch={self.compile.offload_prefetch} is for a step in one piece, and between "
                "pieces values come back in a way of their own",
                "leave out one of the two",
            ),
        ):
            if given:
                raise ConfigError("tpu_config.use_graph_split", problem, cure)

    def _check_family(self) -> None:
        """Finds what a configuration file, or a recipe's author, has put together wrongly, and flags without effect."""
        takes_pictures = isinstance(self.model, FluxConfig)
        family = type(self.model).__name__.removesuffix("Config")
        for flag, is_for_pictures in (
            ("data", isinstance(self.data, ImageDataConfig)),
            ("tokenizer", self.tokenizer is None),
            ("sampling", self.sampling is not None),
        ):
            if is_for_pictures != takes_pictures:
                theirs, others = ("pictures", "documents") if takes_pictures else ("documents", "pictures")
                raise ConfigError(
                    flag, f"{family} is trained on {theirs}, and this section is one for {others}", "use its recipe"
                )
        if not takes_pictures:
            return
        if self.fused_linear_cross_entropy.enable:
            raise ConfigError(
                "fused_linear_cross_entropy.enable", f"{family} has no cross-entropy to be fused", "leave it out"
            )
        if self.rope_kernel.enable and self.model.rope == "matrix":
            raise ConfigError(
                "model.rope", "the RoPE kernel takes cosines and sines, and rope_kernel.enable is on", "leave one out"
            )

    def _check_sampling(self) -> None:
        if self.sampling is None:
            return
        if self.sampling.interval and not self.metrics.tensorboard:
            raise ConfigError(
                "metrics.tensorboard",
                f"pictures drawn with sampling.interval={self.sampling.interval} are written there alone",
                "leave it on, or give --sampling.interval=0",
            )
        if not self.model.guidance_embedding:
            for section in ("data", "sampling"):
                value, default = getattr(self, section).guidance, type(getattr(self, section)).guidance
                if value != default:
                    raise ConfigError(
                        f"{section}.guidance",
                        f"{value} is told to no model without model.guidance_embedding",
                        f"leave it at {default}, or see sampling.classifier_free_guidance",
                    )

    def _check_sizes(self) -> None:
        tensors = self.model.batch_tensors(self.training.sequence_length)
        if isinstance(self.data, ImageDataConfig):
            (image_length,) = (tensor.shape[0] for tensor in tensors if tensor.name == "latents")
            needed = (self.data.resolution // PATCH_PIXELS) ** 2
            if needed > image_length:
                length = self.training.sequence_length
                raise ConfigError(
                    "training.sequence_length",
                    f"{length} leaves {image_length} tokens for pictures, and one of data.resolution="
                    f"{self.data.resolution} has {needed}",
                    f"give {length + needed - image_length}, or a lower resolution",
                )
            return
        if not self.tokenizer.path and self.tokenizer.vocab_size > self.model.vocab_size:
            raise ConfigError(
                "tokenizer.vocab_size",
                f"{self.tokenizer.vocab_size} token ids do not fit model.vocab_size={self.model.vocab_size}",
                "give a smaller vocabulary, or a larger --model.vocab_size",
            )

    def _check_experts(self) -> None:
        flags = [name for name in ("use_grouped_mm", "use_pallas_paired_grouped_mm") if getattr(self, name)]
        if len(flags) == 2:
            raise ConfigError(flags[0], f"{flags[1]} is on too, and both compute the experts", "give one of the two")
        flags += [f"expert_balance.{name}" for name in ("bias", "auxiliary_loss") if getattr(self.expert_balance, name)]
        if flags and not hasattr(self.model, "num_experts"):
            raise ConfigError(
                flags[0],
                f"{type(self.model).__name__.removesuffix('Config')} has no experts",
                "leave it out, or train a mixture of experts such as qwen3_moe_debug",
            )

    def _check_aot(self) -> None:
        if bool(self.hardware) != self.aot.enable:
            flag, missing = ("aot", "--hardware=v6e-2x4") if self.aot.enable else ("hardware", "--aot")
            raise ConfigError(flag, "--aot and --hardware go together", f"add {missing}, or leave --{flag} out")
        if not self.hardware:
            return
        tpu_slice = self.tpu_slice
        if not (self.tpu_config.use_graph_trainer and self.tpu_config.executor == "xla"):
            raise ConfigError(
                "aot", "only the xla executor compiles ahead of time, and another is asked for", "leave that out"
            )
        if self.parallelism.num_devices not in (0, tpu_slice.num_devices):
            raise ConfigError(
                "parallelism.num_devices",
                f"{self.parallelism.num_devices} are not the {tpu_slice.num_devices} devices of {tpu_slice}",
                "leave it out, or name another slice",
            )
        if not self.parallelism.use_simple_fsdp and tpu_slice.num_devices > 1:
            raise ConfigError(
                "parallelism.use_simple_fsdp",
                f"false means one device, and {tpu_slice} has {tpu_slice.num_devices}",
                "leave it on, or give --hardware=v6e-1x1",
            )
        if self.parallelism.data_parallel_replicate % tpu_slice.num_slices:
            raise ConfigError(
                "parallelism.data_parallel_replicate",
                f"{self.parallelism.data_parallel_replicate} is no multiple of the {tpu_slice.num_slices} slices, "
                "between which only the sum of gradients should pass",
                f"give {tpu_slice.num_slices}, or one slice",
            )
        options = tpu_compiler_options(self.compile.tpu_flag_bundles, self.compile.tpu_flags, tpu_slice.generation)
        if dumps := [name for name in options if name.startswith("xla_dump")]:
            raise ConfigError(
                "compile.tpu_flags",
                f"the report reads the compiler's dump itself, and {dumps[0]} is given",
                "leave it out",
            )
        self.resolve_devices(tpu_slice.num_devices)

    def _check_batch(self, parallelism: ParallelismConfig) -> None:
        num_shares, microbatches = parallelism.num_batch_shares, self.training.microbatches
        unit = num_shares * microbatches
        if self.training.batch_size % unit:
            shares = (
                "devices" if num_shares == parallelism.num_devices else "groups of devices with sequences of their own"
            )
            raise ConfigError(
                "training.batch_size",
                f"{self.training.batch_size} is not a multiple of {num_shares} {shares} "
                f"times {microbatches} microbatches",
                f"give a multiple of {unit}, e.g. {_next_multiple(self.training.batch_size, unit)}",
            )


def _next_multiple(number: int, unit: int) -> int:
    return -(-number // unit) * unit
