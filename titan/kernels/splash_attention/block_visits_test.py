"""Which blocks a kernel visits, against every pair of a query and a key."""

import jax.numpy as jnp
import numpy as np
import pytest

from titan.kernels.splash_attention.block_visits import block_visits
from titan.kernels.splash_attention.mask import PositionMask

CHUNK, NUM_RANKS = 96, 4
LENGTH = 2 * NUM_RANKS * CHUNK
MASKS = (PositionMask(True, 0), PositionMask(True, 50), PositionMask(True, 1), PositionMask(False, 70))


@pytest.mark.parametrize("by_key", (False, True), ids=("queries", "keys"))
@pytest.mark.parametrize("blocks", ((32, 64), (48, 128)))
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_each_visible_pair_of_blocks_is_visited_once_and_no_other(mask, blocks, by_key):
    block_q, block_kv = blocks
    for rank, shrink in ((0, True), (2, True), (NUM_RANKS - 1, True), (1, False)):
        starts = np.array([rank * CHUNK, (2 * NUM_RANKS - 1 - rank) * CHUNK], np.int32)
        queries = (starts[:, None] + np.arange(CHUNK)).reshape(-1)
        visible = mask.visible(queries[:, None], np.arange(LENGTH))
        expected = visible.reshape(2 * CHUNK // block_q, block_q, LENGTH // block_kv, block_kv).any(axis=(1, 3))
        visits = block_visits(mask, jnp.asarray(starts), 2 * CHUNK, LENGTH, blocks, by_key=by_key, shrink=shrink)
        np.testing.assert_array_equal(visits.query_index, queries)
        block, is_visited = np.asarray(visits.block[0], np.int32), np.asarray(visits.is_visited[0], bool)
        if by_key:
            block, is_visited, expected = block.T, is_visited.T, expected.T
        if not shrink:
            np.testing.assert_array_equal(is_visited, expected)
        counted = np.zeros(expected.shape, int)
        steps = [(own, other) for own in range(len(block)) for other in range(block.shape[1])]
        for own, step in steps:
            counted[own, block[own, step]] += is_visited[own, step]
        np.testing.assert_array_equal(counted, expected)
        # A step that computes nothing has the block of the next that does.
        following = None
        for own, step in reversed(steps):
            if is_visited[own, step]:
                following = block[own, step]
            elif following is not None:
                assert block[own, step] == following


@pytest.mark.parametrize(("by_key", "most"), ((False, 5), (True, 8)))
def test_steps_that_are_beyond_the_window_of_any_query_are_left_out(by_key, most):
    starts = jnp.array([1024, 6144], jnp.int32)
    visits = block_visits(PositionMask(True, 256), starts, 4096, 16384, (128, 128), by_key=by_key, shrink=True)
    assert visits.block.shape[1 if by_key else 2] <= most
    assert visits.block.dtype == jnp.int16 and visits.is_visited.dtype == jnp.int16  # 128 blocks: more than int8 has
