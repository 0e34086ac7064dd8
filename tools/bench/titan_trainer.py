"""titan's training step as a contender, by the recipes' own path: build, capture, lower, compile."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from titan.train.config.run import Config


class TitanTrainer:
    """A run of a configuration on the devices that it names, from its own initial weights."""

    def __init__(self, config: Config):
        """Builds the run; it is compiled in the first step."""
        from titan.train.build import build
        from titan.train.runtime.xla import XlaRuntime

        self._runtime = XlaRuntime(config)
        self._run = build(config, self._runtime)
        self._state = self._run.initial_state()

    def step(self, batch: Mapping[str, np.ndarray], learning_rate: float) -> float:
        """One training step of one microbatch; returns the loss before the update."""
        import jax

        from titan.train.step.state import LEARNING_RATE

        microbatches = {name: array[None] for name, array in batch.items()}
        inputs = {**microbatches, LEARNING_RATE: np.float32(learning_rate)}
        executable = self._run.train_step.executable_for(inputs)
        self._state, metrics = executable(self._state, executable.place(inputs))
        jax.block_until_ready(self._state)
        return self._runtime.read(metrics)["loss"]

    def parameters(self) -> dict[str, np.ndarray]:
        """The weights as they are now, by fully qualified name."""
        return {name: tensor.numpy() for name, tensor in self._runtime.host_parameters(self._state).items()}


def on_devices(config: Config, num_devices: int) -> Config:
    """The configuration on so many virtual devices, without validation and without a compile cache."""
    return dataclasses.replace(
        config,
        parallelism=dataclasses.replace(config.parallelism, num_devices=num_devices),
        training=dataclasses.replace(config.training, validation_interval=0),
        compile=dataclasses.replace(config.compile, cache_folder=""),
    )
