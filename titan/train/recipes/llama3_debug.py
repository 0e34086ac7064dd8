"""Llama 3 of 6M parameters on the source of Python's standard library: the trial run that any machine can make."""

import sys

from titan.train.config.run import Config
from titan.train.main import main

RECIPE = Config()

if __name__ == "__main__":
    sys.exit(main(RECIPE))
