"""The schedule of a grouped matmul on TPU: which row tile and which group each step works on.

Tiles end at multiples of `tile_m`, groups end anywhere and only at run time, so the schedule is computed on the device
and handed to the kernel as prefetched scalars. The idea is that of MegaBlocks (https://arxiv.org/abs/2211.15841).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class WorkUnits(NamedTuple):
    """Pairs of a row tile and a group that has rows in it, in order of both.

    Units of one row tile follow each other, and so do those of one group, which is what lets a kernel keep an output
    block in VMEM over all its visits. Entries beyond `num_units` are padding.

    Attributes:
      group_starts: int32 [G + 2]; group g owns the rows from group_starts[g] up to group_starts[g + 1]. Group G stands
        for the rows that no group owns, up to the end of the last tile.
      group_ids: int32 [U], the group of each unit.
      row_tiles: int32 [U], its row tile.
      num_units: int32 scalar, how many of the U = num_row_tiles + G (+ G) entries are to be worked on.
    """

    group_starts: jax.Array
    group_ids: jax.Array
    row_tiles: jax.Array
    num_units: jax.Array


def row_units(group_sizes: jax.Array, *, num_rows: int, tile_m: int) -> WorkUnits:
    """The units that visit every row once, those that no group owns included; groups without rows have none.

    Args:
      group_sizes: int32 [G], adding up to at most num_rows.
      num_rows: M.
      tile_m: rows in a tile; the last tile may reach beyond num_rows.
    """
    num_groups = group_sizes.shape[0]
    num_tiles = -(-num_rows // tile_m)
    starts = _group_starts(group_sizes, num_rows)
    starts = jnp.append(starts, num_tiles * tile_m)
    return _units(starts, num_groups + 1, num_tiles, tile_m, min_units=0)


def group_units(group_sizes: jax.Array, *, num_rows: int, tile_m: int) -> WorkUnits:
    """The units that visit every group at least once, also one without rows; rows that no group owns are not visited.

    A group without rows gets one unit, on the tile in which it would start, so that its output can be zeroed.
    """
    num_groups = group_sizes.shape[0]
    num_tiles = -(-num_rows // tile_m)
    starts = _group_starts(group_sizes, num_rows)
    return _units(starts, num_groups, num_tiles, tile_m, min_units=1)


def _group_starts(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    # The limit keeps every block inside its array whatever the sizes add up to.
    ends = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), num_rows)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends])


def _units(starts: jax.Array, num_groups: int, num_tiles: int, tile_m: int, min_units: int) -> WorkUnits:
    begin, end = starts[:num_groups], starts[1 : num_groups + 1]
    first_tile = jnp.minimum(begin // tile_m, num_tiles - 1)
    units_of_group = jnp.where(end > begin, (end - 1) // tile_m - first_tile + 1, min_units)
    max_units = num_tiles + num_groups * (1 + min_units)
    group_ids = jnp.repeat(jnp.arange(num_groups, dtype=jnp.int32), units_of_group, total_repeat_length=max_units)
    first_unit = jnp.cumsum(units_of_group) - units_of_group
    position = jnp.arange(max_units, dtype=jnp.int32) - first_unit[group_ids]
    row_tiles = jnp.minimum(first_tile[group_ids] + position, num_tiles - 1)
    return WorkUnits(starts, group_ids, row_tiles.astype(jnp.int32), jnp.sum(units_of_group, dtype=jnp.int32))
