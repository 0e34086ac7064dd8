"""Llama 3.1 405B (405.85B parameters), 16M tokens a step. Give it `--data.path` and `--tokenizer.path`."""

import sys

from titan.models.llama3.config import llama3_405b
from titan.train.main import main
from titan.train.recipes.llama3_pretraining import llama3_pretraining

RECIPE = llama3_pretraining(name="llama3_405b", model=llama3_405b(), learning_rate=8e-5, batch_size=2048)

if __name__ == "__main__":
    sys.exit(main(RECIPE))
