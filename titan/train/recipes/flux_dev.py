"""FLUX.1-dev (11.90B parameters) on pictures of 1024x1024. Give it `--data.path` and `--data.encoders`."""

import sys

from titan.core.checkpoint import CheckpointConfig
from titan.core.data.images.config import ImageDataConfig
from titan.models.flux.config import flux_dev
from titan.train.config.kernels import RopeKernelConfig, SplashAttentionKernelConfig
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.run import Config, LrScheduleConfig, OptimizerConfig, TrainingConfig
from titan.train.config.sampling import SamplingConfig
from titan.train.config.variant import Variant
from titan.train.main import main

_LENGTH = 4096 + 512  # tokens of a picture and of its text

# Published are resolution, pictures a device, bfloat16 and hardware; the schedule is ours. Attention is a kernel: at
# this length scores would not fit.
RECIPE = Config(
    name="flux_dev",
    model=flux_dev(),
    parallelism=ParallelismConfig(gather_dtype="bfloat16"),
    training=TrainingConfig(steps=100_000, batch_size=384, sequence_length=_LENGTH, validation_interval=1000),
    optimizer=OptimizerConfig(learning_rate=1e-4),
    lr_schedule=LrScheduleConfig(kind="constant", warmup_steps=2000),
    data=ImageDataConfig(),
    tokenizer=None,
    sampling=SamplingConfig(interval=1000),
    checkpoint=CheckpointConfig(interval=1000),
    rope_kernel=RopeKernelConfig(enable=True),
    splash_attention_kernel=SplashAttentionKernelConfig(use_splash_attention_kernel=True),
)

VARIANTS = {
    "v6e-2x4": Variant(
        source="published: 8 chips, three pictures of 1024x1024 a device, bfloat16, FSDP, 2.78 s a step",
        data_parallel_shard=8,
        batch_size=24,
        sequence_length=_LENGTH,
        memory_policy="full",
    ),
    "tpu7x-2x2x2": Variant(
        source="published: 8 chips, three pictures a device, 2.53 s a step, 20.76% MFU",
        data_parallel_shard=16,
        batch_size=48,
        sequence_length=_LENGTH,
        memory_policy="full",
    ),
    "tpu7x-4x4x4": Variant(
        source="published: three pictures a device; ours: one cube of 64 chips",
        data_parallel_shard=128,
        batch_size=384,
        sequence_length=_LENGTH,
        memory_policy="full",
    ),
    "tpu7x-8x8x16": Variant(
        source="published: 1,024 chips, three pictures a device, replicas of 4x4x4 chips, 2.71 s a step, 19.4% MFU",
        data_parallel_shard=128,
        data_parallel_replicate=16,
        batch_size=6144,
        sequence_length=_LENGTH,
        memory_policy="full",
    ),
}

if __name__ == "__main__":
    sys.exit(main(RECIPE, variants=VARIANTS))
