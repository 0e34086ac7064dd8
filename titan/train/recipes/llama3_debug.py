"""Llama 3 of 1.1M parameters on the source of Python's standard library: the trial run that any machine can make.

On two slow cores it takes less than four minutes, in which the loss falls to less than half of what it begins with.
"""

import sys

from titan.core.data.config import TokenizerConfig
from titan.models.llama3.config import Llama3Config
from titan.train.config.run import Config
from titan.train.config.training import OptimizerConfig, TrainingConfig
from titan.train.main import main

RECIPE = Config(
    model=Llama3Config(vocab_size=512, dim=128, ffn_dim=512),
    tokenizer=TokenizerConfig(vocab_size=512),
    training=TrainingConfig(steps=240),
    optimizer=OptimizerConfig(learning_rate=6e-3),
)

if __name__ == "__main__":
    sys.exit(main(RECIPE))
