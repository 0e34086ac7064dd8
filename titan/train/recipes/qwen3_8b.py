"""Qwen3 8B (8.19B parameters), 4M tokens a step. Give it `--data.path` and `--tokenizer.path`."""

import sys

from titan.models.qwen3.config import qwen3_8b
from titan.train.main import main
from titan.train.recipes.qwen3_pretraining import qwen3_pretraining

RECIPE = qwen3_pretraining(name="qwen3_8b", model=qwen3_8b(), learning_rate=3e-4, batch_size=1024)

if __name__ == "__main__":
    sys.exit(main(RECIPE))
