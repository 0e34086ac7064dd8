"""Runs `python -m titan.train RECIPE --flags`."""

import sys

from titan.train.command import command

if __name__ == "__main__":
    sys.exit(command())
