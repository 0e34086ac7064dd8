"""Llama 3.1 70B (70.55B parameters), 8M tokens a step. Give it `--data.path` and `--tokenizer.path`."""

import sys

from titan.models.llama3.config import llama3_70b
from titan.train.main import main
from titan.train.recipes.llama3_pretraining import llama3_pretraining

RECIPE = llama3_pretraining(name="llama3_70b", model=llama3_70b(), learning_rate=1.5e-4, batch_size=1024)

if __name__ == "__main__":
    sys.exit(main(RECIPE))
