"""Llama 3.1 8B (8.03B parameters), 4M tokens a step. Give it `--data.path` and `--tokenizer.path`."""

import sys

from titan.models.llama3.config import llama3_8b
from titan.train.main import main
from titan.train.recipes.llama3_pretraining import llama3_pretraining

RECIPE = llama3_pretraining(name="llama3_8b", model=llama3_8b(), learning_rate=3e-4, batch_size=512)

if __name__ == "__main__":
    sys.exit(main(RECIPE))
