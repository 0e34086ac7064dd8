"""Four virtual CPU devices for the collectives' tests: the number is fixed when JAX makes its first array."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", max(jax.config.jax_num_cpu_devices, 4))
