"""Four virtual CPU devices for the collectives' tests: the number is fixed when JAX makes its first array."""

import jax

from titan.graph.testing.xla_cpu import use_cpu_devices

jax.config.update("jax_platforms", "cpu")
use_cpu_devices(4)
