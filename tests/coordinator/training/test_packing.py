from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_tx.coordinator.training.attention_cost import AttentionCost, attention_cost
from spmd_tx.coordinator.training.packing import TrainingShapes, cheapest_blocks, lay_out
from spmd_tx.models.families.registry import declare
from spmd_tx.protocol.commands import SEGMENTS_PER_ROW
from tests.support.known_models import CONFIGS
from tests.support.model_shapes import QWEN3_30B_A3B, TINY_OF_BENCH, resized

USUAL, NEARLY_FREE, DEAR = map(AttentionCost, (5e-4, 1e-6, 5e-3))
SHAPES = TrainingShapes(
    data_shards=2, train_tokens=1024, block_tokens=(256, 1024), max_context=1000, attention=USUAL
)
CPU = TrainingShapes(1, 4096, (256,), 4096, USUAL)
ACCELERATOR = TrainingShapes(1, 8192, (256, 2048, 8192), 4096, USUAL)


@pytest.mark.parametrize(
    "max_context, longer",
    [
        (10, []),
        (65, [96]),
        (97, [96, 128]),
        (1000, [96, 128, 192, 256, 384, 512, 1024]),
        (4097, [96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 5120]),
    ],
)
def test_row_lengths_double_in_two_steps_when_short_and_reach_the_context(max_context, longer):
    assert replace(SHAPES, max_context=max_context).row_lengths == (16, 64, *longer)


@pytest.mark.parametrize(
    "row_length, sizes",
    [(16, [2]), (64, [4, 32]), (96, [4, 20]), (128, [4, 16]), (256, [2, 8]), (512, [2]), (1024, [2])],
)
def test_blocks_have_the_tokens_they_may_have_or_one_row_per_shard(row_length, sizes):
    assert SHAPES.sizes(row_length) == sizes


def test_the_menu_names_every_shape_that_a_request_can_lead_to():
    menu = SHAPES.blocks()
    assert len(menu) == len(set(menu)) == 14
    for seed in range(50):
        random = np.random.default_rng(seed)
        longest, most = random.integers(2, 1000), random.integers(1, 40)
        layout = lay_out(random.integers(1, longest, most), SHAPES)
        assert {(size, layout.row_length) for _, size in layout.chunks} <= set(menu)


def test_a_server_has_few_programs():
    assert len(CPU.blocks()) == len(CPU.row_lengths) == 11
    assert len(ACCELERATOR.blocks()) == 27


def row_length_of(lengths, shapes=SHAPES):
    return lay_out(np.array(lengths), shapes).row_length


def test_a_few_words_take_a_small_row_and_whatever_fills_more_of_them_a_usual_one():
    assert row_length_of([1]) == row_length_of([16]) == row_length_of([5, 5, 5]) == 16
    assert row_length_of([16, 16]) == 16  # one for each of the two data shards
    assert row_length_of([17]) == row_length_of([11, 11, 11]) == row_length_of([16] * 3) == 64


def test_a_row_longer_than_the_budget_still_gets_one_row_per_shard():
    assert TrainingShapes(4, 64, (64,), 256, USUAL).sizes(256) == [4]


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
def test_blocks_cost_least(count, chunks):
    assert cheapest_blocks(count, [2, 8, 16], row_cost=64.0, block_cost=128.0) == chunks


@given(st.integers(1, 300), st.floats(1, 1e4), st.floats(0, 1e4))
def test_blocks_hold_all_rows_and_none_is_empty(count, row_cost, block_cost):
    blocks = cheapest_blocks(count, [2, 16, 64], row_cost, block_cost)
    assert sum(used for used, _ in blocks) == count
    assert all(0 < used <= size for used, size in blocks)


@given(st.integers(1, 3000), st.sampled_from(ACCELERATOR.row_lengths), st.sampled_from([CPU, ACCELERATOR]))
def test_a_command_can_carry_each_chunk_and_only_the_last_block_of_a_request_has_free_rows(
    count, row_length, shapes
):
    chunks = shapes.chunks(count, row_length)
    assert sum(used for used, _ in chunks) == count
    for used, size in chunks[:-1]:
        assert used % size == 0
    for used, size in chunks:
        assert -(-used // size) <= shapes.most_blocks(size, row_length)


def test_rows_of_many_blocks_are_one_command():
    assert CPU.chunks(33, 128) == [(32, 2), (1, 2)]
    assert CPU.chunks(3, 4096) == [(1, 1), (1, 1), (1, 1)]
    assert ACCELERATOR.chunks(64 + 2, 128) == [(64, 64), (2, 2)]


def test_on_accelerators_a_rest_takes_few_blocks():
    """A block of 256 tokens starts as many operations as one of 2048."""
    assert ACCELERATOR.chunks(64 + 12, 128) == [(64, 64), (12, 16)]
    assert ACCELERATOR.chunks(64 + 50, 128) == [(64, 64), (48, 16), (2, 2)]
    assert replace(ACCELERATOR, block_tokens=(256, 8192)).chunks(12, 128) == [(12, 2)], "as was recorded"


def test_longer_rows_are_taken_as_attention_allows():
    def row_length(cost):
        return row_length_of([143] * 32, replace(ACCELERATOR, attention=cost))

    assert row_length(DEAR) < row_length(NEARLY_FREE)
    assert row_length(attention_cost(TINY_OF_BENCH)) <= 512


LONG = np.random.default_rng(0).integers(1024, 4097, 128)  # tokens of each sequence


def test_a_mixture_takes_rows_as_short_as_its_chosen_experts_make_them():
    """Shorter than those of a model of whose experts every token meets all."""
    shapes = replace(ACCELERATOR, max_context=32768)
    all_meet = resized(QWEN3_30B_A3B, experts_per_token=128)
    mixture, dense = (replace(shapes, attention=attention_cost(each)) for each in (QWEN3_30B_A3B, all_meet))
    assert [lay_out(LONG, each).row_length for each in (mixture, dense)] == [4096, 8192]


def test_a_recorded_layout_is_read_back():
    other = TrainingShapes(2, 64, (64,), max_context=64, attention=NEARLY_FREE)
    assert other.as_recorded(SHAPES.layout) == replace(SHAPES, train_tokens=64)
    assert other.as_recorded(None) == other


@pytest.mark.parametrize(
    "layout, row_length, rows",
    [
        ("1x32768x1.14e-05 in blocks of 256+2048+8192", 8192, 42),
        ("1x32768x1.14e-05 in blocks of 256+2048+8192 with kernels ab12", 8192, 42),
        ("1x32768x0.000113 in blocks of 256+2048+8192", 4096, 92),
        ("1x4096x0.0005 in blocks of 256", 4096, 92),
    ],
)
def test_a_request_of_an_earlier_version_is_cut_as_it_was(layout, row_length, rows):
    """Whatever attention costs today, also in a model with a window."""
    gpt_oss = attention_cost(declare(CONFIGS["openai/gpt-oss-120b"]))
    for today in (attention_cost(QWEN3_30B_A3B), gpt_oss):
        shapes = replace(ACCELERATOR, max_context=32768, attention=today, kernels="ab12")
        again = shapes.as_recorded(layout)
        assert again.layout.removesuffix(" with kernels ab12") == layout.removesuffix(" with kernels ab12")
        found = lay_out(LONG, again)
        assert (found.row_length, int(found.rows.max()) + 1) == (row_length, rows)


def test_rows_that_just_hold_the_context_are_left_out_where_an_earlier_version_had_longer_ones():
    """They would be chosen where that version chose two shorter rows, so that sums would differ."""
    shapes = replace(ACCELERATOR, max_context=40_960, attention=NEARLY_FREE)
    earlier = shapes.as_recorded(f"1x40960x{NEARLY_FREE} in blocks of 256+2048+8192")
    two_of_them = np.array([18_000, 18_000])
    assert lay_out(two_of_them, shapes).row_length == 40_960
    assert lay_out(two_of_them, earlier).row_length == 32_768
    assert lay_out(np.array([33_000]), earlier).row_length == 40_960
    assert shapes.as_recorded(shapes.layout) == shapes
    assert shapes.as_recorded(earlier.layout) == earlier


def test_a_layout_with_a_window_is_read_back():
    windowed = replace(SHAPES, attention=AttentionCost(2.51e-05, 2.51e-05, 128))
    assert windowed.layout == "2x1000x2.51e-05+2.51e-05/128 in blocks of 256+1024"
    assert SHAPES.as_recorded(windowed.layout) == windowed
    assert windowed.as_recorded(SHAPES.layout) == SHAPES


def test_a_layout_tells_which_kernels_were_used():
    tried, again = (replace(SHAPES, kernels=kernels) for kernels in ("ab12", "cd34"))
    assert again.as_recorded(tried.layout) == again
    found = [again.has_other_kernels(each) for each in (tried.layout, again.layout, SHAPES.layout, None)]
    assert found == [True, False, False, False]
    assert SHAPES.has_other_kernels(tried.layout)


def test_requests_of_an_earlier_version_are_cut_as_new_ones_are():
    assert SHAPES.as_recorded("2x1024x1000") == SHAPES
    assert SHAPES.as_recorded("2x512x500x0.001") == SHAPES


def test_rows_cannot_be_split_over_another_number_of_data_shards():
    other = replace(SHAPES, data_shards=1, block_tokens=(64,))
    assert other.as_recorded(SHAPES.layout) == other


def test_samples_of_one_length_just_above_a_power_of_two_take_rows_that_fit():
    layout = lay_out(np.array([95] * 64), CPU)
    assert (layout.row_length, layout.chunks) == (96, [(42, 2), (22, 2)])


@pytest.mark.parametrize("shards, expert_shards", [(2, 1), (4, 1), (5, 1), (4, 2), (6, 2), (6, 3), (8, 4)])
def test_all_pairs_of_data_shards_share_experts_like_the_first(shards, expert_shards):
    pairs = replace(CPU, data_shards=shards, expert_shards=expert_shards).choices[2]
    assert (0, 1) in pairs
    assert len({shard for pair in pairs for shard in pair}) == 2 * len(pairs)
    assert len(pairs) == (1 if expert_shards == 3 else shards // 2)
    for one, other in pairs:
        assert (one // expert_shards == other // expert_shards) == (expert_shards > 1)


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
    assert row_length_of([33] * 30, TrainingShapes(1, 1024, (256,), 1024, NEARLY_FREE)) > 64


def test_one_sequence_takes_the_shortest_row_that_others_can_join():
    assert [row_length_of([n], CPU) for n in (60, 90, 128, 140, 250)] == [64, 96, 128, 192, 256]


def test_many_short_sequences_take_longer_rows_and_so_fewer_blocks():
    assert row_length_of([64] * 8, CPU) == 128


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_a_few_rows_leave_room_for_those_of_others(shards):
    shapes = replace(CPU, data_shards=shards)
    assert row_length_of([128] * 4, shapes) == 128
