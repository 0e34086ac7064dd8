"""Shapes of the route scores: small ones for tests, real ones for compiles and benchmarks."""

from typing import Any

import jax
import jax.numpy as jnp

from titan.kernels.kernel_case import KernelCase
from titan.kernels.route_scores.op import apply_route_scores_op
from titan.kernels.route_scores.tiles import resolve, vmem_bytes
from titan.kernels.target import Target, lowering_for
from titan.kernels.tpu_compile import tpu_device

SMALL = ((1, 1), (5, 40), (130, 300), (128, 256))
"""Rows and columns: fewer than a block, more than one block of either, whole blocks."""

REAL = ((65536, 4096), (65536, 2048))
"""8192 tokens x top-8, with the dims of Qwen3 235B-A22B and Qwen3 30B-A3B (their published configs)."""


def aot_cases(generation: str) -> list[KernelCase]:
    """Forward and backward in bfloat16, scores in float32, for a TPU generation ("v5e", "v5p", "v6e", "tpu7x")."""
    return [_case(num_rows, num_columns, generation) for num_rows, num_columns in REAL]


def forward_and_backward(implementation: str) -> Any:
    """(expert_out, scores, grad_out) -> (out, gradients), as a JAX function."""

    def run(expert_out: jax.Array, scores: jax.Array, grad_out: jax.Array) -> tuple[jax.Array, Any]:
        out = apply_route_scores_op.jax(expert_out, scores, implementation=implementation)
        gradients = apply_route_scores_op.backward.jax(
            expert_out, scores, grad_out, implementation=implementation, block_m=0, block_e=0
        )
        return out, gradients

    return run


def _case(num_rows: int, num_columns: int, generation: str) -> KernelCase:
    rows = jax.ShapeDtypeStruct((num_rows, num_columns), jnp.bfloat16)
    with lowering_for(Target("tpu", tpu_device(generation).device_kind)):
        tiles = resolve(0, 0, num_columns=num_columns, itemsize=2)
    return KernelCase(
        kernel="route_scores",
        name=f"M{num_rows} E{num_columns}",
        args=(rows, jax.ShapeDtypeStruct((num_rows,), jnp.float32), rows),
        fused=forward_and_backward("mosaic"),
        unfused=forward_and_backward("xla"),
        flops=0.0,
        hbm_bytes=2.0 * num_rows * num_columns * 5 + 4.0 * num_rows * 3,
        vmem_bytes=vmem_bytes(tiles, itemsize=2),
    )
