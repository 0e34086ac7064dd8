"""What of a run's configuration passes may depend on. Imports no torch."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """What of a run's configuration a pass may depend on.

    Attributes:
      memory_policy: the text of `--compile.memory_policy`.
      reshard_after_forward: whether gathered parameters are given up after the forward pass.
      offload_prefetch: layers ahead at which an offloaded value is fetched.
      config: the run's whole configuration, in which a plugin's pass finds its section of flags.
    """

    memory_policy: str = "none"
    reshard_after_forward: bool = True
    offload_prefetch: int = 1
    config: Any = None
