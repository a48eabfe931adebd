from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_tx.coordinator.training.attention_cost import AttentionCost, attention_cost
from spmd_tx.models.families.registry import declare
from tests.support.known_models import CONFIGS
from tests.support.model_shapes import QWEN3_30B_A3B, TINY_OF_BENCH, resized

WINDOWED = AttentionCost(1e-4, 1e-4, window=128)


def test_attention_counts_less_the_wider_a_model_is():
    wide = resized(TINY_OF_BENCH, d_model=1024, d_ff=3072)
    assert attention_cost(wide).share < attention_cost(TINY_OF_BENCH).share / 3
    assert attention_cost(TINY_OF_BENCH).share == pytest.approx(5e-4, rel=0.1)


def test_only_the_experts_of_a_token_take_time():
    """With ten times the experts a token's products take as long as before; with more of its own, longer."""
    more = resized(QWEN3_30B_A3B, n_experts=1280)
    assert attention_cost(more).share > 0.9 * attention_cost(QWEN3_30B_A3B).share
    chosen = resized(QWEN3_30B_A3B, experts_per_token=64)
    assert attention_cost(chosen).share < attention_cost(QWEN3_30B_A3B).share / 4


# FLOPs of attention in training per token of a row, of all layers, and numbers that a token meets.
COUNTED = {
    "Qwen/Qwen3-30B-A3B": (48 * 7 * 32 * 128, 3.04e9),
    "deepseek-ai/DeepSeek-V3.1": (61 * 128 * (4 * 192 + 3 * 128), 36.6e9),
    "openai/gpt-oss-120b": (18 * 7 * 64 * 64, 5.13e9),  # and as much in layers with a window
    "Qwen/Qwen3.5-35B-A3B": (10 * 7 * 16 * 256, 2.95e9),  # of 40 layers 30 have linear attention
}


@pytest.mark.parametrize("name", COUNTED)
def test_every_layer_counts_with_its_own_widths(name):
    flops, met = COUNTED[name]
    cost = attention_cost(declare(CONFIGS[name]))
    assert cost.share == pytest.approx(flops / (4 * met), rel=0.01)
    is_windowed = "gpt-oss" in name
    assert (cost.windowed_share, cost.window) == ((cost.share, 128) if is_windowed else (0, 0))


@pytest.mark.parametrize("row_length", [16, 128, 129, 1024])
def test_within_a_window_a_token_sees_as_many_as_are_there(row_length):
    seen = sum(min(place + 1, 128) for place in range(row_length)) / row_length
    of_window = WINDOWED.of(row_length) - WINDOWED.share * row_length
    assert of_window == pytest.approx(2 * seen * WINDOWED.windowed_share, rel=0.1)


def test_longer_rows_cost_hardly_more_where_all_layers_have_a_window():
    narrow = replace(WINDOWED, share=0.0)
    assert narrow.of(128) == 128 * narrow.windowed_share
    assert narrow.of(1024) < narrow.of(4096) < 2 * narrow.of(128)


shares = st.floats(1e-9, 1e-2)


@given(st.builds(AttentionCost, shares) | st.builds(AttentionCost, shares, shares, st.integers(1, 2**20)))
def test_a_cost_is_read_back_as_it_was_written(cost):
    assert AttentionCost.read(str(cost)) == cost
    assert not set("x ") & set(str(cost)), "which separate it from the rest of a layout"


def test_a_cost_of_an_earlier_version_is_that_of_its_rows():
    earlier = AttentionCost.read("1.14e-05")
    assert [earlier.of(length) for length in (64, 8192)] == [1.14e-05 * 64, 1.14e-05 * 8192]
