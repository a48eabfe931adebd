"""Rows read their first blocks with others only where all have all of the pages, and each reads the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.attention.paged import mosaic
from spmd_tx.models.attention.paged.prefixes import prefix_groups

PAGES, PAGE, WIDTH = 2, 4, 24  # pages of a block, tokens of a page, pages of a table

ROWS = 12
find = jax.jit(prefix_groups, static_argnums=(0, 1, 4))


def groups(tables, lasts, most=4):
    """Return the rows of each group, and how many blocks they read together.

    Behind them stand rows that nobody reads, up to ROWS.
    """
    count = len(tables)
    tables = np.concatenate([tables, 90_000 + distinct(ROWS - count)]).astype(np.int32)
    lasts = np.pad(lasts, (0, ROWS - count), constant_values=-1).astype(np.int32)
    found = find(PAGES, PAGE, tables, lasts, most)
    rows, members, places, blocks = (np.asarray(x).tolist() for x in jax.tree.leaves(found))
    assert sorted(rows) == list(range(len(tables)))
    got, step = [], 0
    while step < len(rows):
        behind = step + members[step]
        assert behind > step, "a group begins where the last one ends"
        assert members[step + 1 : behind] == [0] * (behind - step - 1)
        assert places[step:behind] == list(range(behind - step))
        assert len(set(blocks[step:behind])) == 1
        got.append((rows[step:behind], blocks[step]))
        step = behind
    assert [each for each in got if max(each[0]) >= count] == [([row], 0) for row in range(count, ROWS)]
    return [each for each in got if max(each[0]) < count]


def distinct(rows):
    return 1 + np.arange(rows * WIDTH).reshape(rows, WIDTH)


def test_samples_of_a_prompt_read_what_all_see_together():
    tables = distinct(5)
    tables[[1, 3, 4], :9] = tables[0, :9]
    assert groups(tables, [40, 35, 20, 70, 33]) == [([0, 1, 3, 4], 4), ([2], 0)]


def test_rows_that_see_as_many_blocks_read_together():
    """The block of a row's last token is its own."""
    tables = np.tile(distinct(1), (4, 1))
    assert groups(tables, [31, 40, 47, 24]) == [([0, 3], 3), ([1, 2], 5)]


def test_more_rows_than_a_group_has_are_several():
    tables = distinct(6)
    tables[:, :4] = tables[0, :4]
    assert groups(tables, [16] * 6) == [([0, 1, 2, 3], 2), ([4, 5], 2)]


def test_a_last_page_in_common_is_not_enough():
    tables = distinct(3)
    tables[1:, 1] = tables[0, 1]
    tables[2, 0] = tables[0, 0]
    assert groups(tables, [15] * 3) == [([0, 2], 1), ([1], 0)]


def test_a_row_that_nobody_reads_is_alone():
    tables = np.tile(distinct(1), (3, 1))
    assert groups(tables, [15, -1, 15]) == [([0, 2], 1), ([1], 0)]


def test_samples_of_prompts_with_a_common_beginning_share_their_whole_prompts():
    tables = distinct(4)
    tables[1, :8] = tables[0, :8]
    tables[2:, :4] = tables[0, :4]
    tables[3, :6] = tables[2, :6]
    assert groups(tables, [60] * 4) == [([0, 1], 4), ([2, 3], 3)]


@pytest.mark.parametrize("seed", range(6))
def test_what_is_read_together_all_have_and_see(seed):
    random = np.random.default_rng(seed)
    tables = distinct(12)
    for row in range(1, 12):  # forks of earlier rows, some of which were forks
        common = random.integers(WIDTH)
        tables[row, :common] = tables[random.integers(row), :common]
    tables[random.integers(12), random.integers(WIDTH)] = 9999
    lasts = random.integers(-1, WIDTH * PAGE, 12)
    for rows, blocks in groups(tables, lasts):
        assert len(rows) == 1 or blocks > 0
        for row in rows:
            assert (tables[row, : blocks * PAGES] == tables[rows[0], : blocks * PAGES]).all()
            assert blocks == 0 or lasts[row] >= blocks * PAGES * PAGE


def test_a_prompt_of_many_samples_is_read_once():
    """By 128 rows of 8 prompts, in any order, as a device of eight has them with 64 prompts of 16 samples."""
    random = np.random.default_rng(0)
    tables = 1 + np.arange(128 * 96).reshape(128, 96)  # of 16 tokens
    prompts = random.permutation(np.arange(128) // 16)
    tables[:, :64] = tables[prompts, :64]
    lasts = 1024 + random.integers(512, size=128)
    pool = jnp.zeros((1, 1, 16, 8 * 128), jnp.bfloat16)
    found = jax.jit(mosaic.sharing, static_argnums=0)(
        (128, 32, 128), pool, jnp.asarray(tables), jnp.asarray(lasts)
    )
    members, blocks = np.asarray(found.members), np.asarray(found.blocks)
    assert members[members > 0].tolist() == [16] * 8
    assert blocks.tolist() == [4] * 128  # of 256 tokens
    assert mosaic.sharing((1, 32, 128), pool, *(jnp.asarray(x[:1]) for x in (tables, lasts))) is None
