"""Llama 3.1 405B (405.85B parameters), 16M tokens a step. Give it `--data.path` and `--tokenizer.path`."""

import sys

from titan.models.llama3.config import llama3_405b
from titan.train.config.variant import Variant
from titan.train.main import main
from titan.train.recipes.llama3_pretraining import llama3_pretraining

RECIPE = llama3_pretraining(name="llama3_405b", model=llama3_405b(), learning_rate=8e-5, batch_size=2048)

# Published for Llama 3 405B is about 57% MFU on 128 to 1,024 v7x chips; batch, sequence and mesh are not, and are ours.
VARIANTS = {
    "tpu7x-4x4x4": Variant(
        source="ours: a sequence a device",
        leaves={
            "parallelism.data_parallel_shard": 128,
            "training.batch_size": 128,
            "training.sequence_length": 8192,
            "compile.memory_policy": "offload",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "tpu7x-4x4x8": Variant(
        source="published: 128 chips, about 57% MFU; ours: a sequence a device",
        leaves={
            "parallelism.data_parallel_shard": 256,
            "training.batch_size": 256,
            "training.sequence_length": 8192,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
    "tpu7x-8x8x16": Variant(
        source="published: 1,024 chips, about 57% MFU; ours: the recipe's batch, replicas of 128 chips",
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
