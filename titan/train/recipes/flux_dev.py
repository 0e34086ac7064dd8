"""FLUX.1-dev (11.90B parameters) on images of 1024x1024. Give it `--data.path` and `--data.encoders`."""

import sys

from titan.core.checkpoint import CheckpointConfig
from titan.core.data.images.config import ImageDataConfig
from titan.models.flux.config import flux_dev
from titan.train.config.kernels import RopeKernelConfig, SplashAttentionKernelConfig
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.run import Config
from titan.train.config.sampling import SamplingConfig
from titan.train.config.training import LrScheduleConfig, OptimizerConfig, TrainingConfig
from titan.train.config.variant import Variant
from titan.train.main import main

_LENGTH = 4096 + 512  # tokens of an image and of its text

# Published are resolution, images a device, bfloat16 and hardware; the schedule is ours. Attention is a kernel: at
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
    splash_attention_kernel=SplashAttentionKernelConfig(enable=True),
)

VARIANTS = {
    "v6e-2x4": Variant(
        source="published: 8 chips, three images of 1024x1024 a device, bfloat16, FSDP, 2.78 s a step",
        leaves={
            "parallelism.data_parallel_shard": 8,
            "training.batch_size": 24,
            "training.sequence_length": _LENGTH,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "tpu7x-2x2x2": Variant(
        source="published: 8 chips, three images a device, 2.53 s a step, 20.76% MFU",
        leaves={
            "parallelism.data_parallel_shard": 16,
            "training.batch_size": 48,
            "training.sequence_length": _LENGTH,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "tpu7x-4x4x4": Variant(
        source="published: three images a device; ours: one cube of 64 chips",
        leaves={
            "parallelism.data_parallel_shard": 128,
            "training.batch_size": 384,
            "training.sequence_length": _LENGTH,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "tpu7x-8x8x16": Variant(
        source="published: 1,024 chips, three images a device, replicas of 4x4x4 chips, 2.71 s a step, 19.4% MFU",
        leaves={
            "parallelism.data_parallel_shard": 128,
            "parallelism.data_parallel_replicate": 16,
            "training.batch_size": 6144,
            "training.sequence_length": _LENGTH,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
}

if __name__ == "__main__":
    sys.exit(main(RECIPE, variants=VARIANTS))
