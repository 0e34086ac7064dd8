"""Muse Glimmer of 2.8M parameters on the source of Python's standard library: a trial run that any machine can make.

Two periods of three layers with a window of 64 tokens and a global one.
"""

import sys

from titan.models.muse_glimmer.config import muse_glimmer_debug
from titan.train.config.run import Config
from titan.train.config.training import TrainingConfig
from titan.train.main import main

RECIPE = Config(name="muse_glimmer_debug", model=muse_glimmer_debug(), training=TrainingConfig(steps=200, batch_size=8))

if __name__ == "__main__":
    sys.exit(main(RECIPE))
