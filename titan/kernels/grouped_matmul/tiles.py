"""Block sizes of the grouped matmul on TPU: their type, what they cost, and those used when none are given."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from titan.kernels.generations import MIB
from titan.kernels.target import current_target
from titan.kernels.tile_table import lookup
from titan.kernels.vmem import check_vmem, vmem_budget_bytes

_LANES = 128
_MULTIPLES = (16, _LANES, _LANES)  # of rows, those in a bfloat16 register
_ROW_TILES = (128, 256, 512, 1024)

Kernel = Literal["forward", "dlhs", "drhs"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)


class Blocks(NamedTuple):
    """Block sizes of one kernel, along the forward's dims: rows M, contracted K, columns N."""

    tile_m: int
    tile_k: int
    tile_n: int


@dataclasses.dataclass(frozen=True)
class GroupedMatmulTiles:
    """Block sizes (tile_m, tile_k, tile_n) of the three kernels; each names dims of the forward, lhs_MK and rhs_GKN.

    0 means: from the tuned table for this shape and TPU, else the blocks that move the fewest bytes of those that fit.

    Attributes:
      forward: of the product.
      dlhs: of the gradient of the rows, which contracts N.
      drhs: of the gradient of the weights, which contracts M.

    Raises:
      ValueError: a row tile is no multiple of 16, or another one no multiple of 128.
    """

    forward: tuple[int, int, int] = (0, 0, 0)
    dlhs: tuple[int, int, int] = (0, 0, 0)
    drhs: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_blocks(field.name, getattr(self, field.name))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes on which block sizes depend.

    Attributes:
      num_rows, num_k, num_n, num_groups: M, K, N and G.
      num_weights: 1, or 2 for the paired kernels.
      itemsize: bytes of an element of lhs and weights.
    """

    num_rows: int
    num_k: int
    num_n: int
    num_groups: int
    num_weights: int
    itemsize: int

    @property
    def kernel(self) -> str:
        """The name of the tile table."""
        return "grouped_matmul" if self.num_weights == 1 else "paired_grouped_matmul"

    @property
    def key(self) -> str:
        """The name of these sizes in the tile table."""
        return f"M{self.num_rows} K{self.num_k} N{self.num_n} G{self.num_groups} {8 * self.itemsize}bit"


def check_blocks(name: str, blocks: tuple[int, ...]) -> None:
    """Refuses sizes that no kernel takes.

    Raises:
      ValueError: see `GroupedMatmulTiles`.
    """
    if len(blocks) != 3:
        raise ValueError(f"{name} tiles are {blocks}: give (tile_m, tile_k, tile_n)")
    for dim, size, multiple in zip(Blocks._fields, blocks, _MULTIPLES, strict=True):
        if size < 0 or size % multiple:
            raise ValueError(f"{name} tiles have {dim}={size}: it must be a multiple of {multiple}, or 0 for automatic")


def table_names(kernel: Kernel) -> tuple[str, str, str]:
    """The names of a kernel's blocks in the tile table."""
    return f"{kernel}_tile_m", f"{kernel}_tile_k", f"{kernel}_tile_n"


def resolve(kernel: Kernel, given: tuple[int, ...], problem: Problem) -> Blocks:
    """The block sizes to run with on the current target.

    Raises:
      ValueError: sizes that no kernel takes.
      VmemError: they exceed the vector memory.
    """
    check_blocks(kernel, given)
    generation = current_target().generation
    tuned = None if all(given) else lookup(problem.kernel, generation, problem.key)
    if tuned is not None:
        given = tuple(size or tuned.get(name, 0) for name, size in zip(table_names(kernel), given, strict=True))
    blocks = Blocks(*given) if all(given) else default_blocks(kernel, problem, generation, given)
    check_vmem(
        f"{problem.kernel} {kernel}",
        blocks,
        estimate=lambda other: vmem_bytes(kernel, other, problem),
        alternatives=candidates(problem),
        generation=generation,
        config_section="grouped_matmul",
    )
    return blocks


@functools.cache
def default_blocks(kernel: Kernel, problem: Problem, generation: str, given: tuple[int, ...] = (0, 0, 0)) -> Blocks:
    """The blocks that move the fewest HBM bytes among those that fit, with the sizes in `given` that are not 0.

    Row tiles are about half a group, from 128 to 512: a tile that two groups share is worked on twice. If nothing fits
    beside the sizes given, the smallest blocks are returned.
    """
    budget = vmem_budget_bytes(generation or "v5e")
    half_group = problem.num_rows // problem.num_groups // 2
    tile_m = given[0] or (512 if half_group >= 512 else 256 if half_group >= 256 else 128)
    options = [
        Blocks(tile_m, given[1] or other.tile_k, given[2] or other.tile_n)
        for other in candidates(problem)
        if other.tile_m == _ROW_TILES[0]
    ]
    fitting = [blocks for blocks in options if vmem_bytes(kernel, blocks, problem) <= budget]
    if not fitting:
        return min(options, key=lambda blocks: vmem_bytes(kernel, blocks, problem))
    return min(
        fitting, key=lambda blocks: (hbm_bytes(kernel, blocks, problem), vmem_bytes(kernel, blocks, problem), blocks)
    )


def candidates(problem: Problem) -> Iterator[Blocks]:
    """Blocks worth trying: K and N in equal parts, rounded up to whole registers."""
    for tile_m in _ROW_TILES:
        for tile_k in _equal_parts(problem.num_k):
            for tile_n in _equal_parts(problem.num_n):
                yield Blocks(tile_m, tile_k, tile_n)


def vmem_bytes(kernel: Kernel, blocks: Blocks, problem: Problem) -> int:
    """The vector memory that a kernel's blocks need.

    Inputs and outputs have two buffers each, accumulators one, in float32. The compiler copies the blocks that it is
    about to multiply: one of the rows, for weight gradients one of each factor. With 3/4 MiB for the rest this was an
    upper bound of what it reported, by at most 2.5 MiB for the pair in bfloat16 and by at most 6 for others (libtpu
    0.0.42, all three kernels).
    """
    tile_m, tile_k, tile_n = blocks
    size, weights = problem.itemsize, problem.num_weights
    row_block, column_block = tile_m * tile_k * size, tile_m * tile_n * size
    weight_block = tile_k * tile_n * size
    if kernel == "forward":
        inputs, outputs = row_block + weights * weight_block, weights * column_block
        accumulators, copies = weights * tile_m * tile_n * 4, row_block
    elif kernel == "dlhs":
        inputs, outputs = weights * (column_block + weight_block), row_block
        accumulators, copies = tile_m * tile_k * 4, column_block
    else:
        inputs, outputs = row_block + weights * column_block, weights * weight_block
        accumulators, copies = weights * tile_k * tile_n * 4, row_block + column_block
    return 2 * (inputs + outputs) + accumulators + copies + 3 * MIB // 4


def hbm_bytes(kernel: Kernel, blocks: Blocks, problem: Problem) -> int:
    """What a kernel moves to and from HBM when each group boundary splits a row tile.

    A weight block stays in VMEM over the row tiles of its group where the contracted dim is one block.
    """
    tile_m, tile_k, tile_n = blocks
    weights, groups = problem.num_weights, problem.num_groups
    tiles_k, tiles_n = -(-problem.num_k // tile_k), -(-problem.num_n // tile_n)
    units = -(-problem.num_rows // tile_m) + groups
    rows, columns = units * tile_m * tiles_k * tile_k, weights * units * tile_m * tiles_n * tile_n
    matrix = weights * tiles_k * tile_k * tiles_n * tile_n
    if kernel == "forward":
        elements = rows * tiles_n + columns + matrix * (groups if tiles_k == 1 else units)
    elif kernel == "dlhs":
        elements = columns * tiles_k + rows + matrix * (groups if tiles_n == 1 else units)
    else:
        elements = rows * tiles_n + columns * tiles_k + matrix * groups
    return elements * problem.itemsize


def num_steps(blocks: Blocks, problem: Problem) -> int:
    """Grid steps of any of the kernels when each group boundary splits a row tile."""
    units = -(-problem.num_rows // blocks.tile_m) + problem.num_groups
    return units * -(-problem.num_k // blocks.tile_k) * -(-problem.num_n // blocks.tile_n)


def _equal_parts(size: int) -> list[int]:
    registers = -(-size // _LANES)
    return sorted({_LANES * -(-registers // parts) for parts in range(1, registers + 1)})
