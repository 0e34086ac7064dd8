"""The configuration of one training run: the root of the tree. Its checks are in `checks`.

Imports neither torch nor jax, so that flags are parsed and checked before anything heavy is loaded.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from titan.core.checkpoint import CheckpointConfig
from titan.core.config.tree import option
from titan.core.data.config import DataConfig, TokenizerConfig
from titan.core.data.images.config import ImageDataConfig
from titan.core.metrics import MetricsConfig
from titan.core.profiler import ProfilerConfig
from titan.core.tpu_slice import TpuSlice, parse_tpu_slice
from titan.models.family import ModelConfig
from titan.models.llama3.config import Llama3Config
from titan.train.config.compile import AotConfig, CompileConfig, TpuConfig
from titan.train.config.expert_balance import ExpertBalanceConfig
from titan.train.config.kernels import (
    FusedLinearCrossEntropyConfig,
    GroupedMatmulConfig,
    RopeKernelConfig,
    SplashAttentionKernelConfig,
)
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.processes import DistributedConfig
from titan.train.config.sampling import SamplingConfig
from titan.train.config.training import LrScheduleConfig, OptimizerConfig, TrainingConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run. The defaults are those of a small Llama 3."""

    renamed_leaves: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "splash_attention_kernel.use_splash_attention_kernel": ("splash_attention_kernel.enable",),
        "model.pictures_per_row": ("model.images_per_row",),
        "data.max_pictures": ("data.max_images",),
        "sampling.num_pictures": ("sampling.num_images",),
        "profiler.enable_profiling": ("profiler.enable",),
        "use_grouped_mm": ("grouped_matmul.enable",),
        "use_pallas_paired_grouped_mm": ("grouped_matmul.enable", "grouped_matmul.paired"),
        "grouped_mm_implementation": ("grouped_matmul.implementation",),
    }
    """Leaves by the names that they had before version 0.2: flags and files may use these for one version."""

    name: str = option(
        "llama3_debug", "Name of the run; its files lie below it unless checkpoint.folder says otherwise."
    )
    plugins: tuple[str, ...] = option(
        (),
        "Modules that are imported before the flags are read; they register model families, kernels, passes, recipes "
        "and more.",
    )
    model: ModelConfig = option(Llama3Config(), "Hyperparameters of the model.")
    parallelism: ParallelismConfig = option(
        ParallelismConfig(), "Devices, the mesh axes over them, and the dtypes of collectives."
    )
    training: TrainingConfig = option(
        TrainingConfig(), "Length of the run, size of the batch, seed, clipping, validation."
    )
    optimizer: OptimizerConfig = option(OptimizerConfig(), "Which optimizer, and its settings.")
    expert_balance: ExpertBalanceConfig = option(
        ExpertBalanceConfig(), "What keeps the experts of a mixture equally busy."
    )
    lr_schedule: LrScheduleConfig = option(LrScheduleConfig(), "Learning rate by step: warm-up, then a decay.")
    data: DataConfig | ImageDataConfig = option(
        DataConfig(), "Documents, or images with captions, to train on, and those held out."
    )
    tokenizer: TokenizerConfig | None = option(
        TokenizerConfig(), "A tokenizer to load, or to train on the documents. Not there for images."
    )
    sampling: SamplingConfig | None = option(None, "Images sampled while training. Not there for a model of documents.")
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
    grouped_matmul: GroupedMatmulConfig = option(
        GroupedMatmulConfig(), "Experts by grouped matmuls, each row with its own expert's weights."
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
        from titan.train.config.checks import CHECKS

        for check in CHECKS:
            check(self)

    def resolve_devices(self, num_present: int) -> "Config":
        """This configuration for a machine with so many devices: `parallelism` in numbers, the batch checked.

        Raises:
          ConfigError: see `ParallelismConfig.resolve`; or the devices and microbatches do not divide the batch.
        """
        from titan.train.config.parallelism_checks import check_batch

        parallelism = self.parallelism.resolve(num_present)
        check_batch(self, parallelism)
        return dataclasses.replace(self, parallelism=parallelism)
