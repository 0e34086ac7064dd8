"""Shapes of the grouped matmul: small ones for tests, real ones for compiles and benchmarks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from titan.kernels.grouped_matmul.op import grouped_matmul_op, paired_grouped_matmul_op
from titan.kernels.grouped_matmul.tiles import KERNELS, Problem, default_blocks, vmem_bytes
from titan.kernels.jax_op import JaxOp
from titan.kernels.kernel_case import KernelCase


@dataclasses.dataclass(frozen=True)
class SmallShape:
    """Sizes for a test: rows M, their columns K, the result's N, and the rows of each group."""

    name: str
    num_rows: int
    num_k: int
    num_n: int
    group_sizes: tuple[int, ...]


SMALL = (
    SmallShape("odd_sizes", 50, 200, 136, (7, 0, 20, 9, 3)),
    SmallShape("narrow", 50, 40, 24, (0, 50, 0)),
    SmallShape("whole_tiles", 64, 128, 256, (16, 32, 16)),
    SmallShape("no_owned_row", 33, 128, 128, (0, 0)),
)
"""Groups that share a tile, empty ones, one that has it all, rows without a group, dims that no tile divides."""


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """A mixture-of-experts layer: num_rows token copies (tokens x top-k) of width dim, experts with ffn_dim."""

    num_rows: int
    dim: int
    ffn_dim: int
    num_experts: int

    def __str__(self) -> str:
        return f"M{self.num_rows} dim{self.dim} ffn{self.ffn_dim} E{self.num_experts}"


REAL = (
    ExpertShape(num_rows=65536, dim=4096, ffn_dim=1536, num_experts=128),
    ExpertShape(num_rows=65536, dim=2048, ffn_dim=768, num_experts=128),
)
"""8192 tokens x top-8: the experts of Qwen3 235B-A22B and of Qwen3 30B-A3B (their published configs)."""


def aot_cases(generation: str) -> list[KernelCase]:
    """Forward and backward in bfloat16 at the shapes of REAL, for a TPU generation ("v5e", "v5p", "v6e", "tpu7x")."""
    cases = []
    for shape in REAL:
        up, down = (shape.dim, shape.ffn_dim), (shape.ffn_dim, shape.dim)
        cases += [
            _grouped_case(shape, "up", up, generation),
            _grouped_case(shape, "down", down, generation),
            _paired_case(shape, generation),
            *_swiglu_cases(shape, generation),
        ]
    return cases


def forward_and_backward(op: JaxOp, implementation: str) -> Callable[..., Any]:
    """(inputs..., result gradients...) -> (results, gradients) of an op, as a JAX function."""
    num_inputs = len(op.signature.inputs)
    tiles = dict.fromkeys(op.backward.signature.attributes, (0, 0, 0))

    def run(*args: jax.Array) -> tuple[Any, Any]:
        results = op.jax(*args[:num_inputs], implementation=implementation)
        return results, op.backward.jax(*args, implementation=implementation, **tiles)

    return run


def differentiable(op: JaxOp, implementation: str) -> Callable[..., Any]:
    """An op as a JAX function with its own gradient, for use inside a larger one."""
    tiles = dict.fromkeys(op.backward.signature.attributes, (0, 0, 0))

    @jax.custom_vjp
    def run(*args: jax.Array) -> Any:
        return op.jax(*args, implementation=implementation)

    def backward(args: tuple[jax.Array, ...], grads: Any) -> tuple[jax.Array | None, ...]:
        grads = grads if isinstance(grads, tuple) else (grads,)
        gradients = op.backward.jax(*args, *grads, implementation=implementation, **tiles)
        return tuple(getattr(gradients, name, None) for name in op.signature.inputs)

    run.defvjp(lambda *args: (run(*args), args), backward)
    return run


def _spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _sizes(shape: ExpertShape) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shape.num_experts,), jnp.int32)


def _most_vmem(shape: ExpertShape, num_k: int, num_n: int, num_weights: int, generation: str) -> int:
    problem = Problem(shape.num_rows, num_k, num_n, shape.num_experts, num_weights, itemsize=2)
    return max(vmem_bytes(kernel, default_blocks(kernel, problem, generation), problem) for kernel in KERNELS)


def _ideal_bytes(shape: ExpertShape, num_k: int, num_n: int, num_weights: int) -> float:
    """Each of the three kernels reads its two factors and writes its product once."""
    elements = shape.num_rows * num_k + num_weights * (shape.num_rows + shape.num_experts * num_k) * num_n
    return 3 * 2 * elements


def _flops(shape: ExpertShape, num_weights: int) -> float:
    return 3 * 2 * shape.num_rows * shape.dim * shape.ffn_dim * num_weights


def _grouped_case(shape: ExpertShape, name: str, dims: tuple[int, int], generation: str) -> KernelCase:
    num_k, num_n = dims
    rows, grads = _spec(shape.num_rows, num_k), _spec(shape.num_rows, num_n)
    return KernelCase(
        kernel="grouped_matmul",
        name=f"{name} {shape}",
        args=(rows, _spec(shape.num_experts, num_k, num_n), _sizes(shape), grads),
        fused=forward_and_backward(grouped_matmul_op, "auto"),
        unfused=forward_and_backward(grouped_matmul_op, "ragged_dot"),
        flops=_flops(shape, 1),
        hbm_bytes=_ideal_bytes(shape, num_k, num_n, 1),
        vmem_bytes=_most_vmem(shape, num_k, num_n, 1, generation),
    )


def _paired_case(shape: ExpertShape, generation: str) -> KernelCase:
    weight = _spec(shape.num_experts, shape.dim, shape.ffn_dim)
    grads = _spec(shape.num_rows, shape.ffn_dim)

    def separate(rows, gate, up, sizes, grad_gate, grad_up):
        single = forward_and_backward(grouped_matmul_op, "auto")
        gate_out, gate_grads = single(rows, gate, sizes, grad_gate)
        up_out, up_grads = single(rows, up, sizes, grad_up)
        return gate_out, up_out, gate_grads.lhs + up_grads.lhs, gate_grads.rhs, up_grads.rhs

    return KernelCase(
        kernel="grouped_matmul",
        name=f"paired {shape}",
        args=(_spec(shape.num_rows, shape.dim), weight, weight, _sizes(shape), grads, grads),
        fused=forward_and_backward(paired_grouped_matmul_op, "auto"),
        unfused=separate,
        flops=_flops(shape, 2),
        hbm_bytes=_ideal_bytes(shape, shape.dim, shape.ffn_dim, 2),
        vmem_bytes=_most_vmem(shape, shape.dim, shape.ffn_dim, 2, generation),
    )


def _swiglu_cases(shape: ExpertShape, generation: str) -> list[KernelCase]:
    """Whole expert FFNs: gate and up paired, as two matmuls, and as one with concatenated weights."""
    single = differentiable(grouped_matmul_op, "auto")
    pair = differentiable(paired_grouped_matmul_op, "auto")

    def paired(rows, sizes, down, gate, up):
        gated = pair(rows, gate, up, sizes)
        return single(jax.nn.silu(gated.gate) * gated.up, down, sizes)

    def separate(rows, sizes, down, gate, up):
        return single(jax.nn.silu(single(rows, gate, sizes)) * single(rows, up, sizes), down, sizes)

    def concatenated(rows, sizes, down, gate_up):
        gate, up = jnp.split(single(rows, gate_up, sizes), 2, axis=1)
        return single(jax.nn.silu(gate) * up, down, sizes)

    def with_gradients(ffn: Callable[..., jax.Array]) -> Callable[..., Any]:
        def run(grad: jax.Array, rows: jax.Array, sizes: jax.Array, *weights: jax.Array) -> Any:
            out, vjp = jax.vjp(lambda rows, *weights: ffn(rows, sizes, *weights), rows, *weights)
            return out, vjp(grad)

        return run

    rows, experts, dim, ffn_dim = shape.num_rows, shape.num_experts, shape.dim, shape.ffn_dim
    common = (_spec(rows, dim), _spec(rows, dim), _sizes(shape), _spec(experts, ffn_dim, dim))
    two_weights = (_spec(experts, dim, ffn_dim),) * 2
    variants = (
        ("paired", paired, two_weights, 2, ffn_dim),
        ("separate", separate, two_weights, 1, ffn_dim),
        ("concatenated", concatenated, (_spec(experts, dim, 2 * ffn_dim),), 1, 2 * ffn_dim),
    )
    return [
        KernelCase(
            kernel="grouped_matmul",
            name=f"SwiGLU {name} {shape}",
            args=(*common, *weights),
            fused=with_gradients(ffn),
            unfused=None,
            flops=_flops(shape, 3),
            hbm_bytes=_ideal_bytes(shape, dim, ffn_dim, 2) + _ideal_bytes(shape, ffn_dim, dim, 1),
            vmem_bytes=max(
                _most_vmem(shape, dim, num_n, num_weights, generation),
                _most_vmem(shape, ffn_dim, dim, 1, generation),
            ),
        )
        for name, ffn, weights, num_weights, num_n in variants
    ]
