import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_tx.coordinator.packing import Grid, lay_out, split_rows
from spmd_tx.protocol import SEGMENTS_PER_ROW

GRID = Grid(data_shards=2, train_tokens=1024, max_context=1000)


def test_row_lengths_are_powers_of_two_that_reach_the_context():
    assert GRID.row_lengths == (64, 128, 256, 512, 1024)


@pytest.mark.parametrize(
    "row_length, sizes",
    [(64, [2, 8, 32]), (256, [2, 8]), (1024, [2])],
)
def test_sizes_fill_the_token_budget_of_each_shard(row_length, sizes):
    assert GRID.sizes(row_length) == sizes


def test_a_row_longer_than_the_budget_still_gets_one_row_per_shard():
    assert Grid(data_shards=4, train_tokens=64, max_context=256).sizes(256) == [4]


@pytest.mark.parametrize(
    "count, chunks",
    [
        (1, [(1, 2)]),
        (2, [(2, 2)]),
        (3, [(2, 2), (1, 2)]),  # 8 rows would be less than half full
        (4, [(4, 8)]),
        (9, [(8, 8), (1, 2)]),
        (32, [(32, 32)]),
        (75, [(32, 32), (32, 32), (8, 8), (2, 2), (1, 2)]),
    ],
)
def test_rows_split_into_well_filled_chunks(count, chunks):
    assert split_rows(count, [2, 8, 32]) == chunks


def test_one_row_on_many_shards_is_one_chunk():
    assert split_rows(1, [8, 32]) == [(1, 8)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60))
def test_segments_lie_within_their_rows_and_do_not_overlap(lengths):
    layout = lay_out(np.array(lengths), GRID)
    taken = np.zeros((int(layout.rows.max()) + 1, layout.row_length), int)
    for row, start, length in zip(layout.rows, layout.starts, lengths, strict=True):
        assert start + length <= layout.row_length
        taken[row, start : start + length] += 1
    assert taken.max() == 1
    assert taken.any(axis=1).all()  # no row is empty
    assert sum(used for used, _ in layout.chunks) == len(taken)


def test_a_row_has_no_more_segments_than_workers_can_tell_apart():
    layout = lay_out(np.array([800, *[1] * (3 * SEGMENTS_PER_ROW)]), GRID)
    assert np.bincount(layout.rows).max() == SEGMENTS_PER_ROW


def test_short_segments_share_a_row():
    layout = lay_out(np.array([30, 20, 14]), GRID)
    assert layout.row_length == 64
    assert layout.rows.tolist() == [0, 0, 0]
    assert layout.starts.tolist() == [0, 30, 50]


def test_the_row_length_follows_from_the_padding_not_from_the_longest_segment_alone():
    # Rows of 64 would need one row each (33 + 33 > 64), half empty.
    assert lay_out(np.array([33] * 30), Grid(1, 1024, 1024)).row_length > 64


def test_equal_padding_takes_the_shorter_row():
    assert lay_out(np.array([64] * 16), Grid(1, 1024, 1024)).row_length == 64
