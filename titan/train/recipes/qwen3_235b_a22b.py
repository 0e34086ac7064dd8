"""Qwen3 235B-A22B (235.09B parameters, 22.19B of them active), 8M tokens a step.

Give it `--data.path` and `--tokenizer.path`.
"""

import sys

from titan.models.qwen3.config import qwen3_235b_a22b
from titan.train.config.variant import Variant
from titan.train.main import main
from titan.train.recipes.qwen3_pretraining import qwen3_pretraining

RECIPE = qwen3_pretraining(name="qwen3_235b_a22b", model=qwen3_235b_a22b(), learning_rate=1.5e-4, batch_size=2048)

# Published are chips and speeds, for 64 chips also sequence, sequences a device and offload to the host, which the
# larger runs are taken to share. The shape of the 256 chips and the meshes are ours.
VARIANTS = {
    "tpu7x-4x4x4": Variant(
        source="published: 64 chips, 16 sequences of 4096 a device, host offload, 4,568 tokens/s/chip",
        leaves={
            "parallelism.data_parallel_shard": 128,
            "training.batch_size": 2048,
            "training.sequence_length": 4096,
            "compile.memory_policy": "offload",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "tpu7x-4x8x8": Variant(
        source="published: 256 chips, about 32% MFU; ours: 16 sequences a device and offload, as on 64 chips",
        leaves={
            "parallelism.data_parallel_shard": 512,
            "training.batch_size": 8192,
            "training.sequence_length": 4096,
            "compile.memory_policy": "offload",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "tpu7x-8x8x16": Variant(
        source="published: 1,024 chips in one slice, 32.42% MFU; ours: 16 sequences a device and offload, as on 64 "
        "chips, replicas of 256 chips",
        leaves={
            "parallelism.data_parallel_shard": 512,
            "parallelism.data_parallel_replicate": 4,
            "training.batch_size": 32768,
            "training.sequence_length": 4096,
            "compile.memory_policy": "offload",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "8*tpu7x-8x8x16": Variant(
        source="published: 8 slices of 1,024 chips, 30.51% MFU, 4,208 tokens/s/chip; ours: 16 sequences a device and "
        "offload, as on 64 chips, replicas of 256 chips",
        leaves={
            "parallelism.data_parallel_shard": 512,
            "parallelism.data_parallel_replicate": 32,
            "training.batch_size": 262144,
            "training.sequence_length": 4096,
            "compile.memory_policy": "offload",
            "tpu_config.use_scan_layers": True,
        },
    ),
}

if __name__ == "__main__":
    sys.exit(main(RECIPE, variants=VARIANTS))
