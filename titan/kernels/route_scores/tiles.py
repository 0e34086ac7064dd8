"""Block sizes of the route-score backward on TPU."""

import dataclasses
from collections.abc import Iterator

from titan.kernels.generations import MIB
from titan.kernels.target import current_target
from titan.kernels.vmem import check_vmem, vmem_budget_bytes

_LANES = 128
_ROWS = (512, 256, 128)
_COLUMNS = (8192, 4096, 2048, 1024, 512, 256, 128)


@dataclasses.dataclass(frozen=True)
class RouteScoreTiles:
    """Rows and columns of a block; 0 means the largest that fit.

    Raises:
      ValueError: a size is no multiple of 128.
    """

    block_m: int = 0
    block_e: int = 0

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size < 0 or size % _LANES:
                raise ValueError(f"route score tiles have {name}={size}: it must be a multiple of {_LANES}, or 0")


def vmem_bytes(tiles: RouteScoreTiles, itemsize: int) -> int:
    """The vector memory of a block: expert_out, its gradient and the incoming one, two buffers each, and a product.

    The compiler keeps up to a block of float32 products, and a quarter MiB beside (libtpu 0.0.42).
    """
    return tiles.block_m * tiles.block_e * (3 * 2 * itemsize + 4) + MIB // 4


def resolve(block_m: int, block_e: int, *, num_columns: int, itemsize: int) -> RouteScoreTiles:
    """The blocks to run with on the current target: whole rows where they fit, which leaves nothing to add up.

    Raises:
      ValueError: sizes that the kernel does not take.
      VmemError: they exceed the vector memory.
    """
    given = RouteScoreTiles(block_m, block_e)
    generation = current_target().generation
    budget = vmem_budget_bytes(generation or "v5e")
    options = list(_candidates(num_columns))
    fitting = [
        tiles
        for tiles in (RouteScoreTiles(given.block_m or o.block_m, given.block_e or o.block_e) for o in options)
        if vmem_bytes(tiles, itemsize) <= budget
    ]
    tiles = max(fitting, key=lambda o: (o.block_e, o.block_m)) if fitting else given
    check_vmem(
        "route_scores backward",
        tiles,
        estimate=lambda other: vmem_bytes(other, itemsize),
        alternatives=options,
        generation=generation,
    )
    return tiles


def _candidates(num_columns: int) -> Iterator[RouteScoreTiles]:
    whole = -(-num_columns // _LANES) * _LANES
    for block_m in _ROWS:
        for block_e in (whole, *(size for size in _COLUMNS if size < whole)):
            yield RouteScoreTiles(block_m, block_e)
