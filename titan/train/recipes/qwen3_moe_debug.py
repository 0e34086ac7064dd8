"""Qwen3 of 6M parameters, 8 experts a layer, on the source of Python's standard library: a trial run on any machine.

Shorter and with smaller batches than the dense one, since the loop over experts does the work of all of them.
"""

import sys

from titan.models.qwen3.config import qwen3_moe_debug
from titan.train.config.run import Config
from titan.train.config.training import TrainingConfig
from titan.train.main import main

RECIPE = Config(name="qwen3_moe_debug", model=qwen3_moe_debug(), training=TrainingConfig(steps=200, batch_size=8))

if __name__ == "__main__":
    sys.exit(main(RECIPE))
