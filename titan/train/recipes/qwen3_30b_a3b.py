"""Qwen3 30B-A3B (30.53B parameters, 3.35B of them active), 4M tokens a step.

Give it `--data.path` and `--tokenizer.path`.
"""

import sys

from titan.models.qwen3.config import qwen3_30b_a3b
from titan.train.config.variant import Variant
from titan.train.main import main
from titan.train.recipes.qwen3_pretraining import qwen3_pretraining

RECIPE = qwen3_pretraining(name="qwen3_30b_a3b", model=qwen3_30b_a3b(), learning_rate=3e-4, batch_size=1024)

# Nothing is published of this size on TPUs.
VARIANTS = {
    "tpu7x-4x4x4": Variant(
        source="ours: the recipe's batch, eight sequences a device",
        leaves={
            "parallelism.data_parallel_shard": 128,
            "training.batch_size": 1024,
            "training.sequence_length": 4096,
            "compile.memory_policy": "full",
            "tpu_config.use_scan_layers": True,
        },
    ),
}

if __name__ == "__main__":
    sys.exit(main(RECIPE, variants=VARIANTS))
