"""Rows share the parts of which they have all pages, and no others; every part is read by one row for all."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.attention.paged import triton
from spmd_tx.models.attention.paged.parts import RowParts, shared_parts

PAGE, WIDTH = 4, 24  # tokens of a page, pages of a table
PARTS = RowParts(most=4, block=8, least=2, blocks=12)  # 16 tokens or more: four pages


ROWS = 12
find = jax.jit(shared_parts, static_argnums=(0, 1, 4))
cut = jax.jit(PARTS.of)


def found(tables, lasts, most=4):
    """The rows of each part of each row; behind them stand rows that nobody reads, up to ROWS."""
    count = len(tables)
    tables = np.concatenate([tables, 9000 + distinct(ROWS - len(tables))]).astype(np.int32)
    lasts = np.pad(lasts, (0, ROWS - len(lasts)), constant_values=-1).astype(np.int32)
    shared = find(PARTS, PAGE, tables, lasts, most)
    rows, counts = np.asarray(shared.rows), np.asarray(shared.counts)
    assert counts[count:].tolist() == [[1] + [0] * (counts.shape[1] - 1)] * (ROWS - count)
    counts = counts[:count]
    return {
        (row, part): rows[row, part, : counts[row, part]].tolist()
        for row, part in zip(*np.nonzero(counts), strict=True)
    }


def distinct(rows):
    return 1 + np.arange(rows * WIDTH).reshape(rows, WIDTH)


def test_samples_of_a_prompt_share_what_all_see():
    tables = distinct(5)
    tables[[1, 3, 4], :9] = tables[0, :9]  # 36 tokens, of which 32 are two parts
    assert found(tables, [40, 35, 20, 70, 20]) == {
        **{(0, 0): [0, 1, 4], (0, 1): [0, 1], (0, 2): [0], (1, 2): [1]},
        **{(2, 0): [2], (2, 1): [2], (4, 1): [4]},  # row 4 does not see all of its second part
        **{(3, part): [3] for part in range(3)},  # longer parts have other borders
    }


def test_more_rows_than_a_program_takes_are_read_in_several():
    tables = distinct(6)
    tables[:, :4] = tables[0, :4]
    assert found(tables, [16] * 6)[0, 0] == [0, 1, 2, 3]
    assert found(tables, [16] * 6)[4, 0] == [4, 5]


def test_a_last_page_in_common_is_not_enough():
    tables = distinct(2)
    tables[1, 3] = tables[0, 3]
    assert found(tables, [15, 15]) == {(0, 0): [0], (1, 0): [1]}


def test_a_row_that_nobody_reads_shares_nothing_and_has_a_part():
    tables = np.tile(distinct(1), (3, 1))
    assert found(tables, [15, -1, 15]) == {(0, 0): [0, 2], (1, 0): [1]}


@pytest.mark.parametrize("seed", range(4))
def test_every_part_of_every_row_is_read_once_and_from_its_own_pages(seed):
    random = np.random.default_rng(seed)
    tables = distinct(12)
    for row in range(1, 12):  # forks of earlier rows, some of which were forks
        common = random.integers(WIDTH)
        tables[row, :common] = tables[random.integers(row), :common]
    lasts = random.integers(-1, WIDTH * PAGE, 12)
    each, used = (np.asarray(x) for x in cut(lasts.astype(np.int32), np.full(12, -1, np.int32))[2:])
    read = []
    for (row, part), members in found(tables, lasts).items():
        pages = slice(part * each[row] * 2, (part + 1) * each[row] * 2)
        for member in members:
            assert (tables[member, pages] == tables[row, pages]).all()
            assert len(members) == 1 or lasts[member] + 1 >= (part + 1) * each[row] * 8
        read += [(member, part) for member in members]
    assert sorted(read) == [(row, part) for row in range(12) for part in range(used[row])]


cut_long = jax.jit(RowParts(most=8, block=64, least=4, blocks=4096).of)


@pytest.mark.parametrize("blocks", [1, 31, 64, 65, 500, 4000])
def test_the_parts_of_a_row_are_few_and_hardly_longer_than_equal_ones(blocks):
    first, end, each, used = map(int, cut_long(np.int32(blocks * 64 - 1), np.int32(-1)))
    assert (first, end) == (0, blocks)
    assert each * (used - 1) < blocks <= each * used
    assert used <= 8
    assert each <= max(4, -(-blocks // 8) * 1.25)


def test_a_prompt_of_many_samples_is_read_once():
    """By 128 rows of 8 prompts, as a device of eight has them with 64 prompts of 16 samples."""
    tables = 1 + np.arange(128 * 24).reshape(128, 24)  # of 64 tokens
    for row in range(128):
        tables[row, :16] = tables[row // 16 * 16, :16]
    lasts = 1024 + np.random.default_rng(0).integers(512, size=128)
    pool = jnp.zeros((1, 1, 64, 8 * 128))
    arrays = jnp.asarray(tables, jnp.int32), jnp.asarray(lasts, jnp.int32)
    shared = jax.jit(triton.sharing, static_argnums=0)((128, 32, 128), pool, *arrays)
    counts = np.asarray(shared.counts)
    assert np.sum(counts[:, :4] > 0) == 8 * 4  # 1,024 tokens are four parts
    assert (counts[::16, :4] == 16).all()
    few = jax.eval_shape(partial(triton.sharing, (1, 32, 128)), pool, *(x[:1] for x in arrays))
    assert few.rows.shape[2] == 4
    assert triton.sharing((16, 20, 576), jnp.zeros((1, 1, 32, 576)), *(x[:16] for x in arrays)) is None
