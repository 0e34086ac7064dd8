"""What a run sets for its whole process, in one place: variables that glibc and torch read, and JAX's settings."""

import os
import pathlib
import sys

# Optimizer steps allocate and free whole tensors: with 4 KiB pages a CPU step spends a quarter of its time in page
# faults.
_GLIBC_TUNABLES = "glibc.malloc.hugetlb=1"


def restart_with_tunables() -> None:
    """Starts this program anew where GLIBC_TUNABLES is not set, which glibc reads only when a process begins.

    For programs to call before anything else; the process keeps its number, and what it was started with.
    """
    if "GLIBC_TUNABLES" in os.environ or not sys.platform.startswith("linux"):
        return
    os.environ["GLIBC_TUNABLES"] = _GLIBC_TUNABLES
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prepare_torch() -> None:
    """Must come before torch is imported: where TorchTPU is installed, torch would load it, which changes captures."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def configure_jax(*, num_virtual_devices: int, cache_folder: str) -> None:
    """Must come before JAX is asked for its devices.

    Args:
      num_virtual_devices: CPU devices of this process on a machine without an accelerator.
      cache_folder: of compiled programs; "" for none.
    """
    import jax

    from titan.core.hardware import accelerator_present

    jax.config.update("jax_num_cpu_devices", num_virtual_devices)
    if jax.config.jax_platforms is None and not accelerator_present():
        # libtpu, which is installed to compile for TPUs, otherwise looks for one first, and complains at length.
        jax.config.update("jax_platforms", "cpu")
    if num_virtual_devices > 1:
        # XLA's CPU client has as many threads as cores. A collective holds one per device until all have come, so
        # with few cores two programs in flight can hold all of them for ever. NPROC is XLA's name for that number.
        os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 4 * num_virtual_devices)))
    if cache_folder:
        # Everything is cached, however quickly it compiled: a second start compiles nothing.
        jax.config.update("jax_compilation_cache_dir", os.fspath(pathlib.Path(cache_folder).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
