"""Grouped matmuls as the tuner sees them: the three kernels of the single and of the paired one, at real shapes."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from titan.kernels.grouped_matmul.arg_specs import REAL
from titan.kernels.grouped_matmul.op import grouped_matmul_op, paired_grouped_matmul_op
from titan.kernels.grouped_matmul.tiles import (
    KERNELS,
    Blocks,
    Kernel,
    Problem,
    candidates,
    hbm_bytes,
    num_steps,
    table_names,
    vmem_bytes,
)
from titan.kernels.kernel_case import TuningCase
from titan.kernels.vmem import vmem_budget_bytes

_AUTOMATIC = (0, 0, 0)
# Of the automatic implementations on TPU: megablox for the single matmul, titan's own for the pair.
_HLO_NAMES = {
    1: {"forward": "gmm", "dlhs": "gmm", "drhs": "tgmm"},
    2: {
        "forward": "grouped_matmul",
        "dlhs": "grouped_matmul_transposed",
        "drhs": "grouped_matmul_weight_gradient",
    },
}
# The compiler's schedule knows nothing of waits for memory: blocks that move much more than need be are not tried.
_MOST_EXTRA_TRAFFIC = 1.15


def tuning_cases(generation: str) -> Iterator[TuningCase]:
    """Cases in bfloat16 for a TPU generation ("v5e", "v5p", "v6e", "tpu7x")."""
    for shape in REAL:
        sizes = shape.num_rows, shape.num_experts
        yield from _cases(_problem(sizes, shape.dim, shape.ffn_dim, num_weights=1), generation)
        yield from _cases(_problem(sizes, shape.ffn_dim, shape.dim, num_weights=1), generation)
        yield from _cases(_problem(sizes, shape.dim, shape.ffn_dim, num_weights=2), generation)


def _problem(sizes: tuple[int, int], num_k: int, num_n: int, *, num_weights: int) -> Problem:
    num_rows, num_groups = sizes
    return Problem(num_rows, num_k, num_n, num_groups, num_weights, itemsize=2)


def _cases(problem: Problem, generation: str) -> Iterator[TuningCase]:
    for kernel in KERNELS:
        yield TuningCase(
            kernel=problem.kernel,
            key=problem.key,
            pass_name=kernel,
            args=_arguments(problem, backward=kernel != "forward"),
            candidates=tuple(
                dict(zip(table_names(kernel), blocks, strict=True)) for blocks in _sparing(kernel, problem, generation)
            ),
            build=functools.partial(_build, kernel, problem),
            hlo_name=_HLO_NAMES[problem.num_weights][kernel],
            num_steps=lambda sizes, kernel=kernel: num_steps(_blocks(kernel, sizes), problem),
            values={1 + problem.num_weights: _uneven_sizes(problem)},
        )


def _uneven_sizes(problem: Problem) -> tuple[int, ...]:
    """Sizes of the groups, large and small in turn, that use up the rows and end within a row tile."""
    even = problem.num_rows // problem.num_groups
    sizes = [even + (even // 3 if group % 2 else -(even // 3)) for group in range(problem.num_groups)]
    return (*sizes[:-1], problem.num_rows - sum(sizes[:-1]))


def _arguments(problem: Problem, *, backward: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    def spec(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    weights = (spec(problem.num_groups, problem.num_k, problem.num_n),) * problem.num_weights
    sizes = jax.ShapeDtypeStruct((problem.num_groups,), jnp.int32)
    grads = (spec(problem.num_rows, problem.num_n),) * problem.num_weights
    return (spec(problem.num_rows, problem.num_k), *weights, sizes, *(grads if backward else ()))


def _sparing(kernel: Kernel, problem: Problem, generation: str) -> list[Blocks]:
    """Blocks that fit, and move hardly more than the best with the same row tile."""
    budget = vmem_budget_bytes(generation)
    traffic = {
        blocks: hbm_bytes(kernel, blocks, problem)
        for blocks in candidates(problem)
        if vmem_bytes(kernel, blocks, problem) <= budget
    }
    least: dict[int, int] = {}
    for blocks, moved in traffic.items():
        least[blocks.tile_m] = min(moved, least.get(blocks.tile_m, moved))
    return [blocks for blocks, moved in traffic.items() if moved <= _MOST_EXTRA_TRAFFIC * least[blocks.tile_m]]


def _blocks(kernel: Kernel, sizes: dict[str, int]) -> Blocks:
    return Blocks(*(sizes[name] for name in table_names(kernel)))


def _build(kernel: Kernel, problem: Problem, sizes: dict[str, int]) -> Callable[..., Any]:
    op = grouped_matmul_op if problem.num_weights == 1 else paired_grouped_matmul_op
    tiles = {f"{other}_tiles": _AUTOMATIC for other in KERNELS} | {f"{kernel}_tiles": tuple(_blocks(kernel, sizes))}
    if kernel == "forward":
        return lambda *args: op.jax(*args, **tiles)

    def gradient(*args: jax.Array) -> Any:
        gradients = op.backward.jax(*args, dlhs_tiles=tiles["dlhs_tiles"], drhs_tiles=tiles["drhs_tiles"])
        return gradients.lhs if kernel == "dlhs" else gradients[1:]

    return gradient
