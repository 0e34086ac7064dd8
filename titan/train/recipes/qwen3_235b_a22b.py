"""Qwen3 235B-A22B (235.09B parameters, 22.19B of them active), 8M tokens a step.

Give it `--data.path` and `--tokenizer.path`.
"""

import sys

from titan.models.qwen3.config import qwen3_235b_a22b
from titan.train.main import main
from titan.train.recipes.qwen3_pretraining import qwen3_pretraining

RECIPE = qwen3_pretraining(name="qwen3_235b_a22b", model=qwen3_235b_a22b(), learning_rate=1.5e-4, batch_size=2048)

if __name__ == "__main__":
    sys.exit(main(RECIPE))
