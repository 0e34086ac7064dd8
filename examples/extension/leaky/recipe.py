"""The recipe `leaky_debug`, and what it is on a TPU slice. Imports neither torch nor JAX."""

from leaky.config import LeakyConfig
from titan.train.config.run import Config
from titan.train.config.training import TrainingConfig
from titan.train.config.variant import Variant, Variants

RECIPE = Config(name="leaky_debug", model=LeakyConfig(), training=TrainingConfig(steps=100, batch_size=8))

VARIANTS: Variants = {
    "v6e-2x4": Variant(
        source="eight chips, data parallel",
        leaves={
            "parallelism.data_parallel_shard": 8,
            "training.batch_size": 64,
            "squared_relu_kernel.enable": True,
            "compile.memory_policy": "full",
        },
    )
}
