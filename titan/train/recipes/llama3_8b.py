"""Llama 3.1 8B (8.03B parameters), 4M tokens a step. Give it `--data.path` and `--tokenizer.path`."""

import sys

from titan.models.llama3.config import llama3_8b
from titan.train.config.variant import Variant
from titan.train.main import main
from titan.train.recipes.llama3_pretraining import llama3_pretraining

RECIPE = llama3_pretraining(name="llama3_8b", model=llama3_8b(), learning_rate=3e-4, batch_size=512)

# No results of Llama 3 8B on these slices are published: all numbers are ours. On tpu7x the batch is the recipe's as
# long as a device has no less than a sequence.
VARIANTS = {
    "v6e-2x4": Variant(
        source="ours: a sequence a device",
        leaves={
            "parallelism.data_parallel_shard": 8,
            "training.batch_size": 8,
            "training.sequence_length": 8192,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "tpu7x-4x4x4": Variant(
        source="ours: the recipe's batch, four sequences a device",
        leaves={
            "parallelism.data_parallel_shard": 128,
            "training.batch_size": 512,
            "training.sequence_length": 8192,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "tpu7x-4x4x8": Variant(
        source="ours: the recipe's batch, two sequences a device",
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
