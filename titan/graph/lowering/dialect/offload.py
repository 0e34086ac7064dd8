"""Activations in pinned host memory: moved there, and back."""

from typing import Any

import jax

import titan.graph._compat  # noqa: F401  (registers torch.ops.ao)
from titan.graph.lowering.table import LoweringContext, lowering


@lowering("ao.offload.default")
def _offload(ctx: LoweringContext, tensor: jax.Array) -> jax.Array:
    return jax.device_put(tensor, jax.memory.Space.Host)


@lowering("ao.reload.default")
def _reload(
    ctx: LoweringContext, tensor: jax.Array, device: Any, original_size: Any = None, original_stride: Any = None
) -> jax.Array:
    return jax.device_put(tensor, jax.memory.Space.Device)


@lowering("ao.wait_tensor.default")
def _wait_tensor(ctx: LoweringContext, tensor: jax.Array, keepalive: Any = None, last_use_of_storage: Any = None):
    return tensor  # XLA places the start and the end of every transfer
