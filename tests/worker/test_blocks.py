"""Rows are cut into blocks of each data shard, and the replies put together again."""

import numpy as np

from spmd_tx.worker.blocks import blocks, joined

SHARDS = 2


def test_blocks_have_rows_of_every_shard_and_join_in_order():
    rows = np.arange(SHARDS * 6 * 5).reshape(SHARDS * 6, 5)
    tree = {"tokens": rows, "slots": rows[:, 0], "none": None}
    parts = list(blocks(tree, SHARDS, 2))
    assert [part["slots"].tolist() for part in parts] == [[0, 5, 30, 35], [10, 15, 40, 45], [20, 25, 50, 55]]
    reply = joined([{"tokens": part["tokens"]} for part in parts], SHARDS)
    assert np.array_equal(np.asarray(reply["tokens"]), rows)


def test_rows_may_be_the_second_dimension_of_a_reply():
    steps = np.arange(3 * SHARDS * 4).reshape(3, SHARDS * 4)
    by_shard = steps.reshape(3, SHARDS, 4)
    parts = [{"tokens": by_shard[:, :, start : start + 2].reshape(3, -1)} for start in (0, 2)]
    assert np.array_equal(np.asarray(joined(parts, SHARDS, axis=1)["tokens"]), steps)


def test_arrays_may_have_a_width_of_zero():
    rows = np.zeros((SHARDS * 4, 3, 0), np.int32)
    parts = list(blocks({"targets": rows}, SHARDS, 2))
    assert [part["targets"].shape for part in parts] == [(SHARDS * 2, 3, 0)] * 2
    assert np.asarray(joined(parts, SHARDS)["targets"]).shape == rows.shape


def test_a_single_block_is_all_rows():
    (whole,) = blocks({"tokens": np.arange(4)}, SHARDS, 0)
    assert whole["tokens"].tolist() == [0, 1, 2, 3]
    assert joined([whole], SHARDS) == whole
    assert joined([], SHARDS) == joined([None, None], SHARDS) == {}


def test_pieces_of_rows_join_and_those_that_were_not_computed_are_zeros():
    rows = np.arange(1, SHARDS * 2 * 6 + 1).reshape(SHARDS, 2, 6)
    parts = [{"x": rows[:, row, start : start + 3]} for row in range(2) for start in (0, 3)]
    whole = np.asarray(joined([*parts[:3], None], SHARDS, pieces=2)["x"])
    expected = rows.copy()
    expected[:, 1, 3:] = 0
    assert np.array_equal(whole, expected.reshape(-1, 6))
