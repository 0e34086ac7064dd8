"""Llama 3.1 70B (70.55B parameters), 8M tokens a step. Give it `--data.path` and `--tokenizer.path`."""

import sys

from titan.models.llama3.config import llama3_70b
from titan.train.config.variant import Variant
from titan.train.main import main
from titan.train.recipes.llama3_pretraining import llama3_pretraining

RECIPE = llama3_pretraining(name="llama3_70b", model=llama3_70b(), learning_rate=1.5e-4, batch_size=1024)

# No results of Llama 3 70B on these slices are published: all numbers are ours. v6e-2x4 is not among them, for
# parameters and optimizer state alone are 788 GiB there, and it has 250.
VARIANTS = {
    "tpu7x-4x4x4": Variant(
        source="ours: two sequences a device",
        leaves={
            "parallelism.data_parallel_shard": 128,
            "training.batch_size": 256,
            "training.sequence_length": 8192,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "tpu7x-4x4x8": Variant(
        source="ours: two sequences a device",
        leaves={
            "parallelism.data_parallel_shard": 256,
            "training.batch_size": 512,
            "training.sequence_length": 8192,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "tpu7x-8x8x16": Variant(
        source="ours: a sequence a device, replicas of 128 chips",
        leaves={
            "parallelism.data_parallel_shard": 256,
            "parallelism.data_parallel_replicate": 8,
            "training.batch_size": 2048,
            "training.sequence_length": 8192,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
}

if __name__ == "__main__":
    sys.exit(main(RECIPE, variants=VARIANTS))
