"""Variants of a recipe: the same training on given hardware, as data. Imports neither torch nor jax."""

import dataclasses
from collections.abc import Mapping

from titan.core.config.tree import replace_leaves
from titan.train.config.run import Config

_LEAVES = {
    "data_parallel_shard": "parallelism.data_parallel_shard",
    "data_parallel_replicate": "parallelism.data_parallel_replicate",
    "batch_size": "training.batch_size",
    "sequence_length": "training.sequence_length",
    "memory_policy": "compile.memory_policy",
    "use_scan_layers": "tpu_config.use_scan_layers",
    "tpu_flag_bundles": "compile.tpu_flag_bundles",
    "tpu_flags": "compile.tpu_flags",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What a recipe is on one TPU slice. The rest, the number of steps included, is the recipe's.

    Attributes:
      source: where the numbers come from.
      data_parallel_shard, data_parallel_replicate: the mesh; their product is the slice's devices.
      batch_size: sequences in one step on all devices.
      sequence_length: tokens in each.
      memory_policy: what the backward pass needs of the forward.
      use_scan_layers: whether equal layers are one loop.
      tpu_flag_bundles, tpu_flags: compiler options.
    """

    source: str
    data_parallel_shard: int
    data_parallel_replicate: int = 1
    batch_size: int
    sequence_length: int
    memory_policy: str
    use_scan_layers: bool = True
    tpu_flag_bundles: tuple[str, ...] = ()
    tpu_flags: tuple[str, ...] = ()

    def of(self, recipe: Config) -> Config:
        """The recipe's configuration on this hardware."""
        return replace_leaves(recipe, {path: getattr(self, name) for name, path in _LEAVES.items()})


Variants = Mapping[str, Variant]
"""Variants by the name of their slice, as `--hardware` takes it."""
