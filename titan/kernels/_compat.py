"""The private names of PyTorch, JAX and tokamax that this package uses, in one place, each imported when it is needed.

Checked with torch 2.13.0, jax 0.10.2 and 0.12.0.1, tokamax 0.0.12 and 0.0.17; the wheel requires the versions of the
lock that it was built with.
"""

from types import ModuleType
from typing import Any, NamedTuple, get_args

from torch._library.custom_ops import CustomOpDef

__all__ = [
    "CustomOpDef",
    "SplashLibrary",
    "jax_splash",
    "megablox",
    "tokamax_gmm",
    "tokamax_residuals",
    "tokamax_splash",
]


class SplashLibrary(NamedTuple):
    """The modules of a library of splash attention.

    Attributes:
      kernel: `_splash_attention_forward` and `_splash_attention_bwd`, the kernels below the library's own autograd.
      mask: classes of masks.
      mask_info: what of a mask each block sees.
      base: where the names are that kernels share.
    """

    kernel: ModuleType
    mask: ModuleType
    mask_info: ModuleType
    base: ModuleType


def jax_splash() -> SplashLibrary:
    """JAX's splash attention, which is public but for the two functions of `kernel`."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
        splash_attention_mask_info,
    )

    return SplashLibrary(
        splash_attention_kernel, splash_attention_mask, splash_attention_mask_info, splash_attention_kernel
    )


def tokamax_splash() -> SplashLibrary:
    """Tokamax' splash attention, of which its public API shows no block sizes."""
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        base,
        splash_attention_kernel,
        splash_attention_mask,
        splash_attention_mask_info,
    )

    return SplashLibrary(splash_attention_kernel, splash_attention_mask, splash_attention_mask_info, base)


def tokamax_residuals(*residuals: Any) -> tuple[Any, ...]:
    """What tokamax' backward pass takes of its forward pass; since version 0.0.17 also a dropout key, here None."""
    kind = tokamax_splash().base.SplashResidualsType
    number = len(get_args(getattr(kind, "__value__", kind)))  # an alias by `type` since 0.0.17
    return (*residuals, *(None,) * (number - len(residuals)))


def megablox() -> ModuleType:
    """JAX's grouped matmul: `gmm` and `tgmm`."""
    import importlib

    # The package has a function of the module's name.
    return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


def tokamax_gmm() -> ModuleType:
    """Tokamax' grouped matmul, of which its public API shows no block sizes: `gmm` and `tgmm`."""
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_kernel

    return pallas_mosaic_tpu_kernel
