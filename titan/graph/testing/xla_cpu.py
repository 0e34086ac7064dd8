"""XLA on CPUs for tests: devices for meshes, and programs that compile quickly."""

import os

import jax

# Options of `jax.jit`. A test runs a program a few times: effort in generating machine code is wasted, and without it a
# program compiles several times as fast. It changes no pass over HLO.
FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
}


def compile_quickly() -> None:
    """Has all programs of this process compiled in that way, those of XlaRuntime too."""
    jax.config.update("jax_disable_most_optimizations", True)


def use_cpu_devices(num: int) -> None:
    """Gives JAX at least so many CPU devices; before anything asks for its devices, as a test file's first statement.

    XLA's CPU client has as many threads as cores, and a collective holds one for each device until all have come: with
    few cores two programs in flight would hold all of them for ever. NPROC is XLA's name for that number.
    """
    num = max(num, jax.config.jax_num_cpu_devices)  # one process may run several files
    os.environ.setdefault("NPROC", str(4 * num))
    jax.config.update("jax_num_cpu_devices", num)
