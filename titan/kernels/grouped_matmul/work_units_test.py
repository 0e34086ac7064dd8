import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from titan.kernels.grouped_matmul.work_units import WorkUnits, group_units, row_units

NUM_ROWS = 170
GROUP_SIZES = st.lists(st.integers(0, 40), min_size=4, max_size=4)
TILE_ROWS = st.sampled_from((8, 16))

row_units_of = jax.jit(row_units, static_argnames=("num_rows", "tile_m"))
group_units_of = jax.jit(group_units, static_argnames=("num_rows", "tile_m"))


def visited_rows(units: WorkUnits, tile_m: int) -> list[tuple[int, int]]:
    """(group, row) for each row that a unit owns, in order."""
    starts, groups, tiles = (np.asarray(x) for x in units[:3])
    visits = []
    for group, tile in list(zip(groups, tiles, strict=True))[: int(units.num_units)]:
        rows = range(max(starts[group], tile * tile_m), min(starts[group + 1], (tile + 1) * tile_m))
        visits += [(int(group), row) for row in rows]
    return visits


@settings(deadline=None, max_examples=20, derandomize=True)
@given(sizes=GROUP_SIZES, tile_m=TILE_ROWS)
def test_row_units_visit_every_row_once_in_order(sizes: list[int], tile_m: int) -> None:
    units = row_units_of(jnp.array(sizes), num_rows=NUM_ROWS, tile_m=tile_m)
    padded = -(-NUM_ROWS // tile_m) * tile_m
    owners = np.repeat(np.arange(len(sizes) + 1), [*sizes, padded - sum(sizes)])
    assert visited_rows(units, tile_m) == [(int(group), row) for row, group in enumerate(owners)]
    assert np.all(np.diff(units.row_tiles) >= 0)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(sizes=GROUP_SIZES, tile_m=TILE_ROWS)
def test_group_units_visit_every_group(sizes: list[int], tile_m: int) -> None:
    units = group_units_of(jnp.array(sizes), num_rows=NUM_ROWS, tile_m=tile_m)
    groups = np.asarray(units.group_ids)[: int(units.num_units)]
    assert np.array_equal(np.unique(groups), np.arange(len(sizes)))
    assert np.all(np.diff(groups) >= 0)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    assert visited_rows(units, tile_m) == [(int(group), row) for row, group in enumerate(owners)]


def test_sizes_beyond_the_rows_stay_inside() -> None:
    units = row_units_of(jnp.array([20, 30]), num_rows=32, tile_m=16)
    assert visited_rows(units, 16) == [(0, row) for row in range(20)] + [(1, row) for row in range(20, 32)]
