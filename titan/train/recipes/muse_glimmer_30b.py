"""Muse Glimmer 30B (27.85B parameters), 2M tokens a step. Give it `--data.path` and `--tokenizer.path`."""

import sys

from titan.core.checkpoint import CheckpointConfig
from titan.models.muse_glimmer.config import muse_glimmer_30b
from titan.train.config.kernels import FusedLinearCrossEntropyConfig, RopeKernelConfig, SplashAttentionKernelConfig
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.run import Config
from titan.train.config.training import LrScheduleConfig, OptimizerConfig, TrainingConfig
from titan.train.config.variant import Variant
from titan.train.main import main

# Published are length, sequences a device, float32 reductions and hardware; the schedule is ours: rates that Llama 3
# has at a like size, 1T tokens, 2,000 steps of warm-up, a cosine to a tenth. Attention and loss are kernels: at this
# length scores and logits would not fit.
RECIPE = Config(
    name="muse_glimmer_30b",
    model=muse_glimmer_30b(),
    parallelism=ParallelismConfig(gather_dtype="bfloat16", reduce_dtype="float32"),
    training=TrainingConfig(
        steps=10**12 // (128 * 16384), batch_size=128, sequence_length=16384, validation_interval=1000
    ),
    optimizer=OptimizerConfig(learning_rate=1.5e-4),
    lr_schedule=LrScheduleConfig(warmup_steps=2000),
    checkpoint=CheckpointConfig(interval=1000),
    rope_kernel=RopeKernelConfig(enable=True),
    splash_attention_kernel=SplashAttentionKernelConfig(enable=True),
    fused_linear_cross_entropy=FusedLinearCrossEntropyConfig(enable=True),
)

VARIANTS = {
    "tpu7x-4x4x4": Variant(
        source="published: 64 chips, a sequence of 16384 a device, float32 reductions, about 44% MFU, 5,848 "
        "tokens/s/chip",
        leaves={
            "parallelism.data_parallel_shard": 128,
            "training.batch_size": 128,
            "training.sequence_length": 16384,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "tpu7x-4x4x8": Variant(
        source="published: 128 chips, 43.4% MFU; ours: a sequence of 16384 a device",
        leaves={
            "parallelism.data_parallel_shard": 256,
            "training.batch_size": 256,
            "training.sequence_length": 16384,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
}

if __name__ == "__main__":
    sys.exit(main(RECIPE, variants=VARIANTS))
