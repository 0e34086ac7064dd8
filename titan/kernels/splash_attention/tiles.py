"""Block sizes of the splash attention kernels: validation, defaults, and what they take of VMEM."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from titan.kernels.generations import MIB
from titan.kernels.vmem import check_vmem, vmem_budget_bytes

LANES = 128
_SUBLANES = 8

# The blocks of queries, keys and keys-per-step of each kernel. Only the dq kernel takes a block of keys in one step.
PASSES = {
    "forward": ("sa_block_q", "sa_block_kv", "sa_block_kv_compute"),
    "dkv": ("sa_block_q_dkv", "sa_block_kv_dkv", "sa_block_kv_dkv_compute"),
    "dq": ("sa_block_q_dq", "sa_block_kv_dq"),
}


@dataclasses.dataclass(frozen=True)
class SplashTiles:
    """Block sizes in tokens, multiples of 128; 0: from the tuned table for the shape and hardware, else the default.

    Attributes:
      sa_block_q: queries in a block, forward.
      sa_block_kv: keys in a block, forward; a multiple of sa_block_kv_compute.
      sa_block_kv_compute: keys that one step of the forward computes on.
      sa_block_q_dkv: queries in a block, gradients of keys and values.
      sa_block_kv_dkv: keys in a block, gradients of keys and values; a multiple of sa_block_kv_dkv_compute.
      sa_block_kv_dkv_compute: keys that one step of it computes on.
      sa_block_q_dq: queries in a block, gradient of queries.
      sa_block_kv_dq: keys in a block, gradient of queries.
      sa_use_fused_bwd_kernel: "jax" only: the gradient of queries comes out of the kernel for keys and values, one
        partial sum for each block of keys: fewer FLOPs, and HBM in proportion to T squared.
      sa_dq_reduction_steps: "tokamax" only, whose backward is always fused: 3 sums the gradient of queries in three
        buffers of q's dtype; 0 keeps a buffer for each block of keys.

    Raises:
      ValueError: a size is invalid; the text names the nearest valid ones.
    """

    sa_block_q: int = 0
    sa_block_kv: int = 0
    sa_block_kv_compute: int = 0
    sa_block_q_dkv: int = 0
    sa_block_kv_dkv: int = 0
    sa_block_kv_dkv_compute: int = 0
    sa_block_q_dq: int = 0
    sa_block_kv_dq: int = 0
    sa_use_fused_bwd_kernel: bool = False
    sa_dq_reduction_steps: int = 0

    def __post_init__(self):
        for name in itertools.chain.from_iterable(PASSES.values()):
            _check_multiple(name, getattr(self, name), LANES, "128")
        for _, block, compute in (PASSES["forward"], PASSES["dkv"]):
            if getattr(self, block) and getattr(self, compute):
                _check_multiple(block, getattr(self, block), getattr(self, compute), f"{compute}={{step}}")
        if self.sa_dq_reduction_steps not in (0, 3):
            raise ValueError(f"sa_dq_reduction_steps={self.sa_dq_reduction_steps}: the kernel knows 0 and 3 only")

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in dataclasses.asdict(self).items() if value)


def table_key(implementation: str, length: int, head_dim: int, dtype: str, causal: bool, window: int) -> str:
    """Key of the tuned table: what the best block sizes depend on."""
    window_name = f"_window{window}" if 0 < window < length else ""  # a wider window hides nothing
    mask = ("causal" if causal else "full") + window_name
    return f"{implementation}_T{length}_D{head_dim}_{dtype}_{mask}"


class TileShape(NamedTuple):
    """What the vector memory of a kernel depends on besides its blocks.

    Attributes:
      length, head_dim: of the keys, and D.
      itemsize: bytes of an element of q, k and v.
      segmented: whether there are segment ids.
      soft_capped: whether there is a soft cap.
      generation: of the TPU; "" for another platform, which has no VMEM.
      fused_backward: whether the kernel of keys and values yields the gradient of queries too.
      dq_reduction_steps: see `SplashTiles`.
      query_length: of what blocks of queries are cut from; 0: as `length`.
    """

    length: int
    head_dim: int
    itemsize: int
    segmented: bool
    soft_capped: bool
    generation: str
    fused_backward: bool = False
    dq_reduction_steps: int = 0
    query_length: int = 0

    @property
    def passes(self) -> tuple[str, ...]:
        """The kernels of forward and backward."""
        return ("forward", "dkv") if self.fused_backward else tuple(PASSES)


def resolve(tiles: SplashTiles, shape: TileShape, tuned: dict[str, int] | None = None) -> SplashTiles:
    """Replaces zeros by `tuned` or default sizes, and clips blocks to the length rounded up to a multiple of 128.

    The default block is 1024, or a smaller one, down to 640, that pads less, with up to 512 keys in a step. Where
    tuned or default sizes do not fit the vector memory beside the given ones, the default is half of that and so on.
    """
    resolved = {}
    for kernel_pass, names in PASSES.items():
        given = [getattr(tiles, name) for name in names]
        preferred = [size or (tuned or {}).get(name, 0) for name, size in zip(names, given, strict=True)]
        choices = [
            dict(zip(names, _resolve_pass(shape, largest, *sizes), strict=True))
            for sizes, largest in ((preferred, 1024), (given, 1024), (given, 512), (given, 256), (given, LANES))
        ]
        # If none fits, the given sizes alone are too large, which `check_pass` reports.
        resolved |= next((c for c in choices if _fits(kernel_pass, SplashTiles(**c), shape)), choices[1])
    return dataclasses.replace(tiles, **resolved)


def candidates(kernel_pass: str, length: int) -> Iterator[SplashTiles]:
    """Block sizes of one kernel ("forward", "dkv", "dq") worth trying at a length; the others are left at 0."""
    names = PASSES[kernel_pass]
    longest = _round_up(length, LANES)
    blocks = sorted({min(longest, size) for size in (256, 512, 1024, 2048, 4096)} | {_default_block(length, 1024)})
    for q, kv in itertools.product(blocks, blocks):
        if len(names) == 2:
            yield SplashTiles(**dict(zip(names, (q, kv), strict=True)))
            continue
        for step in sorted({_largest_divisor(kv, limit) for limit in (256, 512, 1024, 2048)}):
            yield SplashTiles(**dict(zip(names, (q, kv, step), strict=True)))


def vmem_bytes(kernel_pass: str, tiles: SplashTiles, shape: TileShape) -> int:
    """Vector memory that one kernel ("forward", "dkv", "dq") takes, of which `tiles` has its concrete blocks.

    Pallas holds two of each block, that in use and that in flight. The scores of a step, with their mask and
    derivatives, have the compiler's say; the factors are fitted from above to what libtpu 0.0.42 used in 80 compiles
    for v5e, v6e and tpu7x: over all of them, by a median of 17%.
    """
    q, kv, *steps = (getattr(tiles, name) for name in PASSES[kernel_pass])
    step = steps[0] if steps else kv
    row = _round_up(shape.head_dim, LANES)  # of one token, in elements
    element = row * shape.itemsize
    ids = 1 + shape.segmented  # the positions of the queries come in the same form as their segment ids
    if kernel_pass == "forward":
        # Logsumexp, its maximum (tokamax) and ids fill a vector register for each query.
        blocks = element * (2 * q + 2 * kv) + 4 * LANES * q * (2 + ids) + 4 * _SUBLANES * kv * (ids - 1)
        sums = 4 * q * (row + 2 * LANES)
        scores = 0.95 * q * max(step, kv - step)  # the steps are unrolled, and share little
    elif kernel_pass == "dkv":
        blocks = element * (2 * q + 4 * kv) + 4 * _SUBLANES * q * (2 + ids) + 4 * LANES * kv * (ids - 1)
        sums = 4 * kv * 2 * row
        scores = (1.45 + shape.soft_capped) * q * step
        if shape.fused_backward:
            blocks += 4 * row * q
            sums += 4 * row * q
        if shape.dq_reduction_steps:  # all gradients are read and written again, those of keys and values in float32
            blocks += 4 * row * q + (16 * row - 2 * element) * kv
    else:
        blocks = element * (3 * q + 2 * kv) + 4 * _SUBLANES * 2 * q + 4 * LANES * q * ids
        sums = 4 * q * row
        scores = (1.35 + 0.5 * shape.soft_capped) * q * kv
    return int(2 * blocks + sums + 4 * scores) + MIB // 4


def check_pass(kernel_pass: str, tiles: SplashTiles, shape: TileShape) -> None:
    """Refuses blocks of one kernel that do not fit the vector memory; see `vmem_bytes`.

    Raises:
      VmemError: naming the kernel, the need, the budget and the largest blocks that fit.
    """
    check_vmem(
        f"splash attention, {kernel_pass}",
        SplashTiles(**{name: getattr(tiles, name) for name in PASSES[kernel_pass]}),
        estimate=lambda other: vmem_bytes(kernel_pass, other, shape),
        alternatives=candidates(kernel_pass, shape.length),
        generation=shape.generation,
        config_section="splash_attention_kernel",
    )


def _fits(kernel_pass: str, tiles: SplashTiles, shape: TileShape) -> bool:
    return not shape.generation or vmem_bytes(kernel_pass, tiles, shape) <= vmem_budget_bytes(shape.generation)


def _resolve_pass(shape: TileShape, largest: int, q: int, kv: int, step: int | None = None) -> tuple[int, ...]:
    """Blocks of one kernel, where 0 stands for a default of at most `largest`."""
    query_length, longest = shape.query_length or shape.length, _round_up(shape.length, LANES)
    q = min(q or _default_block(query_length, largest), _round_up(query_length, LANES))
    default = _default_block(shape.length, largest)
    if step is None:
        return q, min(kv or default, longest)
    kv = min(kv or _round_up(default, step or LANES), longest)
    return q, kv, _largest_divisor(kv, step or largest // 2)


def _check_multiple(name: str, size: int, step: int, of_what: str) -> None:
    if size >= 0 and size % step == 0:
        return
    lower, upper = size // step * step, _round_up(size, step)
    nearest = f"{lower} or {upper}" if lower > 0 else f"{max(upper, step)}"
    raise ValueError(f"{name}={size} must be a multiple of {of_what.format(step=step)}: take {nearest}")


def _default_block(length: int, largest: int) -> int:
    """Of `largest` and the multiples of 128 above its half, the one that pads `length` least; of those the largest."""
    sizes = range(largest, largest // 2, -LANES)
    return min(min(sizes, key=lambda size: _round_up(length, size)), _round_up(length, LANES))


def _largest_divisor(block: int, limit: int) -> int:
    """The largest multiple of 128 that divides `block` and is at most `limit`, or 128."""
    limit = max(limit, LANES)
    return max(size for size in range(LANES, min(block, limit) + 1, LANES) if block % size == 0)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def matmuls_by_kernel(is_fused: bool) -> dict[str, int]:
    """Matrix products of the scores' size in each of JAX's kernels, by how its name begins; they declare no cost.

    The forward pass needs two; each kernel of the backward pass computes the scores anew.

    Args:
      is_fused: one kernel for all gradients, rather than one for queries and one for keys and values.
    """
    return {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 5 if is_fused else 4}
