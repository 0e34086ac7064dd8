"""Sizes in which the logits are cut: tiles of the XLA loops in HBM, and blocks of the Mosaic kernel in VMEM."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax

from titan.kernels.target import current_target
from titan.kernels.tile_table import lookup
from titan.kernels.vmem import check_vmem, vmem_budget_bytes

KERNEL = "fused_linear_cross_entropy"

LANES = 128
EPILOGUE_ROWS = LANES
"""Vocabulary rows of a block that the Mosaic kernel reduces at a time; they divide every block."""

_TILE_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyTiles:
    """Tile and block sizes, all multiples of 128. 0 means the tuned table's size for the shape, else a default.

    Attributes:
      token_tile: tokens whose logits over the whole vocabulary exist at a time, with gradients="forward".
      vocab_tile: vocabulary entries whose logits for all tokens exist at a time, with gradients="backward".
      block_tokens, block_vocab: the block of logits that the Mosaic kernel accumulates in VMEM.
      block_embed: how much of the embedding dim the Mosaic kernel multiplies at a time; it must divide that dim, or be
        that dim.

    Raises:
      ValueError: a size is negative or no multiple of 128.
    """

    token_tile: int = 0
    vocab_tile: int = 0
    block_tokens: int = 0
    block_vocab: int = 0
    block_embed: int = 0

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            # block_embed alone may be an odd embedding dim as a whole; `check_blocks` knows that dim.
            if size < 0 or (size % LANES and name != "block_embed"):
                raise ValueError(f"{name} is {size}: it must be a multiple of {LANES}, or 0 for the default")


def table_key(num_tokens: int, embed_dim: int, vocab: int, itemsize: int) -> str:
    """The key of a shape in the tuned table."""
    return f"tokens={num_tokens},embed={embed_dim},vocab={vocab},itemsize={itemsize}"


def tiles_for(
    hidden_ME: jax.Array | jax.ShapeDtypeStruct,
    weight_VE: jax.Array | jax.ShapeDtypeStruct,
    *,
    generation: str | None = None,
    **asked: int,
) -> LinearCrossEntropyTiles:
    """The sizes to use for arrays, none of them 0 and none much larger than the arrays.

    Args:
      hidden_ME, weight_VE: arrays or their shapes and dtypes.
      generation: the TPU that they are for, "" for another platform, where the defaults are v6e's; None: the current
        target's.
      asked: sizes by name; one that is 0 or missing is the tuned table's for the shape, else a default.

    Raises:
      ValueError: an asked size is negative or no multiple of 128.
    """
    num_tokens, embed_dim = hidden_ME.shape
    vocab, itemsize = weight_VE.shape[0], hidden_ME.dtype.itemsize
    generation = current_target().generation if generation is None else generation
    sizes = _defaults(num_tokens, embed_dim, itemsize, generation)
    sizes.update(lookup(KERNEL, generation, table_key(num_tokens, embed_dim, vocab, itemsize)) or {})
    sizes.update({name: size for name, size in dataclasses.asdict(LinearCrossEntropyTiles(**asked)).items() if size})
    tokens, entries = _round_up(num_tokens), _round_up(vocab)
    limits = {"token_tile": tokens, "block_tokens": tokens, "vocab_tile": entries, "block_vocab": entries}
    return LinearCrossEntropyTiles(**{name: min(size, limits.get(name, size)) for name, size in sizes.items()})


def _defaults(num_tokens: int, embed_dim: int, itemsize: int, generation: str) -> dict[str, int]:
    # A vocabulary tile adds to the float32 [M, E] gradient of hidden: 3 matmuls of 2 M E v FLOPs for 8 M E bytes, so
    # that 1024 entries give 768 FLOPs a byte, more than any TPU's ratio (v6e: 560). The same holds for a token tile and
    # the [V, E] gradient of weight.
    vocab_tile = min(max(_TILE_BYTES // (4 * num_tokens) // LANES * LANES, 1024), 4096)
    divisors = [size for size in (512, 384, 256, 128) if embed_dim % size == 0]
    sizes = {
        # Off the TPU, memory comes first: a tile's logits are then about as large as one vocabulary tile's.
        "token_tile": 1024 if generation else 512,
        "vocab_tile": vocab_tile,
        "block_tokens": 1024,
        "block_vocab": 2048,
        "block_embed": divisors[0] if divisors else embed_dim,
    }
    # Both blocks together decide how often hidden and weight are read; a smaller VMEM costs the vocabulary block first.
    budget = vmem_budget_bytes(generation or "v6e")
    while vmem_bytes(LinearCrossEntropyTiles(**sizes), itemsize) > budget and sizes["block_vocab"] > LANES:
        sizes["block_vocab"] //= 2
    return sizes


def _round_up(size: int) -> int:
    return -(-size // LANES) * LANES


def vmem_bytes(tiles: LinearCrossEntropyTiles, itemsize: int) -> int:
    """VMEM that the Mosaic kernel's blocks need, in bytes.

    Operands and results are double-buffered, a row of tokens takes 8 sublanes, and the epilogue holds a few copies of
    the rows that it reduces. For the default blocks it says 16.3 MiB where the compiler took 14.9 on v6e and 15.9 on
    tpu7x.
    """
    row = 8 * tiles.block_tokens * 4
    operands = 2 * (tiles.block_tokens + tiles.block_vocab) * tiles.block_embed * itemsize
    accumulator = tiles.block_vocab * tiles.block_tokens * 4
    epilogue = 4 * EPILOGUE_ROWS * tiles.block_tokens * 4
    rows = (2 * 3 + 3) * row  # labels and both results twice, and three scratch rows
    return operands + accumulator + epilogue + rows


def candidates(embed_dim: int, itemsize: int, generation: str) -> Iterator[LinearCrossEntropyTiles]:
    """Blocks of the Mosaic kernel worth trying at an embedding dim, all within the VMEM of a TPU generation."""
    embeds = [size for size in (256, 512, 1024) if embed_dim % size == 0] or [embed_dim]
    for tokens, vocab, embed in itertools.product((512, 1024, 2048), (512, 1024, 2048, 4096), embeds):
        tiles = LinearCrossEntropyTiles(block_tokens=tokens, block_vocab=vocab, block_embed=embed)
        if vmem_bytes(tiles, itemsize) <= vmem_budget_bytes(generation):
            yield tiles


def check_blocks(tiles: LinearCrossEntropyTiles, *, embed_dim: int, itemsize: int, generation: str) -> None:
    """Refuses blocks that the Mosaic kernel cannot use.

    Raises:
      ValueError: block_embed does not fit the embedding dim, with the sizes that do.
      titan.kernels.vmem.VmemError: the blocks exceed the VMEM of the generation, with the largest that fit.
    """
    size = tiles.block_embed
    if size != embed_dim and (embed_dim % size or size % LANES):
        fitting = [str(other) for other in range(LANES, embed_dim, LANES) if embed_dim % other == 0]
        raise ValueError(
            f"block_embed is {size}, and the embedding dim {embed_dim}: choose {', '.join([*fitting, str(embed_dim)])}"
        )
    check_vmem(
        KERNEL,
        tiles,
        estimate=lambda other: vmem_bytes(other, itemsize),
        alternatives=candidates(embed_dim, itemsize, generation) if generation else (),
        generation=generation,
        config_section="fused_linear_cross_entropy",
    )
