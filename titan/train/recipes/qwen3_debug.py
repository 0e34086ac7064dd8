"""Qwen3 of 5M parameters on the source of Python's standard library: a trial run that any machine can make."""

import sys

from titan.models.qwen3.config import qwen3_debug
from titan.train.config.run import Config
from titan.train.config.training import TrainingConfig
from titan.train.main import main

RECIPE = Config(name="qwen3_debug", model=qwen3_debug(), training=TrainingConfig(steps=200))

if __name__ == "__main__":
    sys.exit(main(RECIPE))
