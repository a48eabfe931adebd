from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_tx.coordinator.training.packing import TrainingShapes, attention_share, cheapest_chunks, lay_out
from spmd_tx.protocol.commands import SEGMENTS_PER_ROW
from tests.support.model_shapes import TINY_OF_BENCH

SHAPES = TrainingShapes(data_shards=2, train_tokens=1024, max_context=1000, attention_share=5e-4)
NEARLY_FREE, DEAR = 1e-6, 5e-3  # attention beside products with weights


@pytest.mark.parametrize(
    "max_context, longer",
    [(10, []), (65, [96]), (97, [96, 128]), (1000, [96, 128, 192, 256, 384, 512, 1024])],
)
def test_row_lengths_double_in_two_steps_when_short_and_reach_the_context(max_context, longer):
    assert replace(SHAPES, max_context=max_context).row_lengths == (16, 64, *longer)


@pytest.mark.parametrize(
    "row_length, sizes",
    [(16, [2]), (64, [2, 16]), (96, [2, 16]), (128, [2, 16]), (256, [2, 8]), (512, [2]), (1024, [2])],
)
def test_sizes_fill_the_token_budget_of_each_shard(row_length, sizes):
    assert SHAPES.sizes(row_length) == sizes


def test_the_menu_names_every_shape_that_a_request_can_lead_to():
    menu = SHAPES.micro_batches()
    assert len(menu) == len(set(menu)) == 14
    for seed in range(50):
        random = np.random.default_rng(seed)
        longest, most = random.integers(2, 1000), random.integers(1, 40)
        layout = lay_out(random.integers(1, longest, most), SHAPES)
        assert {(size, layout.row_length) for _, size in layout.chunks} <= set(menu)


def test_a_server_has_few_programs():
    assert len(TrainingShapes(1, 8192, 4096, 5e-4).micro_batches()) == 25


def row_length_of(lengths, shapes=SHAPES):
    return lay_out(np.array(lengths), shapes).row_length


def test_a_few_words_take_a_small_row_and_whatever_fills_more_of_them_a_usual_one():
    assert row_length_of([1]) == row_length_of([16]) == row_length_of([5, 5, 5]) == 16
    assert row_length_of([16, 16]) == 16  # one for each of the two data shards
    assert row_length_of([17]) == row_length_of([11, 11, 11]) == row_length_of([16] * 3) == 64


def test_a_row_longer_than_the_budget_still_gets_one_row_per_shard():
    assert TrainingShapes(4, 64, 256, 5e-4).sizes(256) == [4]


@pytest.mark.parametrize(
    "count, chunks",
    [
        (1, [(1, 2)]),
        (3, [(2, 2), (1, 2)]),
        (9, [(8, 8), (1, 2)]),
        (15, [(15, 16)]),  # more micro-batches would cost more than the free row
        (41, [(16, 16), (16, 16), (8, 8), (1, 2)]),
    ],
)
def test_chunks_cost_least(count, chunks):
    assert cheapest_chunks(count, [2, 8, 16], row_cost=64.0, chunk_cost=128.0) == chunks


@given(st.integers(1, 300), st.floats(1, 1e4), st.floats(0, 1e4))
def test_chunks_hold_all_rows_and_none_is_empty(count, row_cost, chunk_cost):
    chunks = cheapest_chunks(count, [2, 16, 64], row_cost, chunk_cost)
    assert sum(used for used, _ in chunks) == count
    assert all(0 < used <= size for used, size in chunks)


def test_longer_rows_are_taken_as_attention_allows():
    def row_length(share):
        return row_length_of([143] * 32, TrainingShapes(1, 8192, 4096, share))

    assert row_length(DEAR) < row_length(NEARLY_FREE)
    assert row_length(attention_share(TINY_OF_BENCH)) <= 512


def test_attention_counts_less_the_wider_a_model_is():
    wide = replace(TINY_OF_BENCH, d_model=1024, d_ff=3072)
    assert attention_share(wide) < attention_share(TINY_OF_BENCH) / 3
    assert attention_share(TINY_OF_BENCH) == pytest.approx(5e-4, rel=0.1)


def test_a_recorded_layout_is_read_back():
    other = TrainingShapes(data_shards=2, train_tokens=64, max_context=64, attention_share=NEARLY_FREE)
    assert other.as_recorded(SHAPES.layout) == SHAPES
    assert other.as_recorded(None) == other


def test_requests_of_an_earlier_version_are_cut_as_new_ones_are():
    assert SHAPES.as_recorded("2x1024x1000") == SHAPES


def test_rows_cannot_be_split_over_another_number_of_data_shards():
    other = replace(SHAPES, data_shards=1, train_tokens=64)
    assert other.as_recorded(SHAPES.layout) == other


def test_samples_of_one_length_just_above_a_power_of_two_take_rows_that_fit():
    layout = lay_out(np.array([95] * 64), TrainingShapes(1, 8192, 4096, 5e-4))
    assert (layout.row_length, layout.chunks) == (96, [(64, 64)])


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60))
def test_segments_lie_within_their_rows_and_do_not_overlap(lengths):
    layout = lay_out(np.array(lengths), SHAPES)
    taken = np.zeros((int(layout.rows.max()) + 1, layout.row_length), int)
    for row, start, length in zip(layout.rows, layout.starts, lengths, strict=True):
        assert start + length <= layout.row_length
        taken[row, start : start + length] += 1
    assert taken.max() == 1
    assert taken.any(axis=1).all()  # no row is empty
    assert sum(used for used, _ in layout.chunks) == len(taken)


def test_a_row_has_no_more_segments_than_workers_can_tell_apart():
    layout = lay_out(np.array([800, *[1] * (3 * SEGMENTS_PER_ROW)]), SHAPES)
    assert np.bincount(layout.rows).max() == SEGMENTS_PER_ROW


def test_short_segments_share_a_row():
    layout = lay_out(np.array([30, 20, 14]), SHAPES)
    assert layout.row_length == 64
    assert layout.rows.tolist() == [0, 0, 0]
    assert layout.starts.tolist() == [0, 30, 50]


def test_the_row_length_follows_from_the_padding_not_from_the_longest_segment_alone():
    # Rows of 64 would need one row each (33 + 33 > 64), half empty.
    assert row_length_of([33] * 30, TrainingShapes(1, 1024, 1024, NEARLY_FREE)) > 64


def test_equal_padding_takes_the_shorter_row():
    assert row_length_of([64] * 8, TrainingShapes(1, 1024, 1024, NEARLY_FREE)) == 64
