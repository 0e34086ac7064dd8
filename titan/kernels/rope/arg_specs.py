"""Shapes of the rotation: small ones for tests, and those of published models for compiles."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from titan.kernels.kernel_case import KernelCase
from titan.kernels.rope.op import rotate_heads_op
from titan.kernels.rope.pallas_tpu import vmem_bytes

# Batch, tokens, heads, head dim; lengths that no block divides among them.
SMALL = ((1, 1, 1, 128), (2, 24, 3, 128), (1, 130, 2, 256), (2, 40, 2, 64))

# Name, tokens, heads, adjacent pairs.
_REAL = (
    ("Llama 3 8B queries, 8192 tokens", 8192, 32, False),
    ("Llama 3 405B queries, 8192 tokens", 8192, 128, False),
    ("Muse Glimmer 30B queries, 16384 tokens", 16384, 32, True),
)
_HEAD_DIM = 128


def aot_cases(generation: str) -> Iterator[KernelCase]:
    """Forward and backward in bfloat16, one sequence."""
    del generation  # one shape serves all
    for name, length, num_heads, adjacent_pairs in _REAL:
        x = jax.ShapeDtypeStruct((1, length, num_heads * _HEAD_DIM), jnp.bfloat16)
        grad = jax.ShapeDtypeStruct((1, num_heads, length, _HEAD_DIM), jnp.bfloat16)
        angles = jax.ShapeDtypeStruct((1, length, _HEAD_DIM // 2), jnp.float32)
        yield KernelCase(
            kernel="rope",
            name=name,
            args=(x, angles, angles, grad),
            fused=_forward_and_backward("mosaic", adjacent_pairs),
            unfused=_forward_and_backward("xla", adjacent_pairs),
            flops=0.0,  # none of a matrix multiplication
            hbm_bytes=4.0 * x.size * 2 + 2 * 2 * angles.size * 4,
            vmem_bytes=vmem_bytes(length, _HEAD_DIM, itemsize=2),
        )


def _forward_and_backward(implementation: str, adjacent_pairs: bool):
    def run(x, cos, sin, grad):
        chosen = {"adjacent_pairs": adjacent_pairs, "implementation": implementation}
        out = rotate_heads_op.jax(x, cos, sin, **chosen)
        return out, rotate_heads_op.backward.jax(cos, sin, grad, **chosen)

    return run
