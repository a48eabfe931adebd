import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_tx.coordinator.training.attention_cost import AttentionCost
from spmd_tx.coordinator.training.batching import Chunk
from spmd_tx.coordinator.training.micro_batch import MicroBatch
from spmd_tx.coordinator.training.packing import TrainingShapes
from tests.coordinator.training.packed_requests import (
    CROSS_ENTROPY,
    GSPO,
    IN_BLOCKS,
    PPO,
    SHAPES,
    SHARDS,
    SHORT_ROWS,
    alone,
    distilled,
    fields_of,
    half_a_batch,
    of_sequences,
    packed,
    reinforced,
    run,
    supervised,
)

REQUESTS = st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=40), min_size=2, max_size=8)
SERVERS = [
    TrainingShapes(shards, 1024, blocks, 256, AttentionCost(5e-4), expert_shards)
    for shards, expert_shards in ((1, 1), (2, 2), (3, 3), (4, 1), (4, 2), (5, 1), (8, 4))
    for blocks in ((256,), (512,), (128, 1024))
]


@given(REQUESTS, st.sampled_from(SERVERS))
def test_company_changes_no_bit_of_a_gradient_and_no_byte_of_a_row(requests_lengths, shapes):
    chunks = [
        chunk
        for slot, lengths in enumerate(requests_lengths)
        for chunk in packed([reinforced(n, slot) for n in lengths], slot, PPO, shapes=shapes).chunks
    ]
    company = MicroBatch(chunks[0], shapes)
    for chunk in chunks[1:]:
        company.join(chunk)
    assert company.blocks <= shapes.most_blocks(company.size, chunks[0].row_length)
    for chunk in company.chunks:
        solo = MicroBatch(chunk, shapes)
        assert solo.blocks == chunk.blocks
        assert rows_of(company, chunk) == rows_of(solo, chunk)
        for way_round in (1, -1):
            wanted = gradient(solo, chunk.slot, shapes, way_round)
            assert gradient(company, chunk.slot, shapes, way_round).tobytes() == wanted.tobytes()


def rows_of(batch: MicroBatch, chunk: Chunk) -> list[list[bytes]]:
    """Return all arrays of a chunk's rows, where the micro-batch looks for them."""
    rows, loss = batch.rows(), batch.loss()
    numbers = np.arange(len(rows.slots))
    places = {
        its.slot: output.losses for its, output in zip(batch.chunks, batch.cut(numbers, numbers), strict=True)
    }
    assert (rows.slots[places[chunk.slot]] == chunk.slot).all()
    return [
        [values[row].tobytes() for arrays in (rows, loss) for values in fields_of(arrays).values()]
        for row in places[chunk.slot]
    ]


def gradient(batch: MicroBatch, slot: int, shapes: TrainingShapes, way_round: int) -> np.ndarray:
    """Return two float32 sums of a slot, over its rows, as workers make them.

    Those of experts run over the rows of all data shards that share them.
    """
    rows = batch.rows()
    assert batch.rows_of_shard * shapes.data_shards == batch.size
    weights = rows.tokens.astype(np.float32) @ (np.float32(1.1) ** np.arange(rows.tokens.shape[1]))
    of_rows = np.where(rows.slots == slot, weights, 0).astype(np.float32)
    total = np.zeros(2, np.float32)
    for block in of_rows.reshape(shapes.data_shards, batch.blocks, -1).swapaxes(0, 1):
        for place, groups in enumerate((shapes.data_shards, shapes.data_shards // shapes.expert_shards)):
            of_groups = [in_order(group) for group in block.reshape(groups, -1)]
            total[place] += in_order(of_groups[::way_round])
    return total


def in_order(values) -> np.float32:
    total = np.float32(0)
    for value in values:
        total = np.float32(total + value)
    return total


@pytest.mark.parametrize("shards, blocks", [(1, 16), (2, 8), (4, 4), (8, 2)])
def test_eight_tenants_with_four_rows_share_a_micro_batch_without_free_rows(shards, blocks):
    shapes = TrainingShapes(shards, 4096, (256,), max_context=4096, attention=AttentionCost(5e-4))
    losses = [CROSS_ENTROPY, PPO]
    chunks = [
        packed(
            [make(128, slot) for make in [(supervised, reinforced)[slot % 2]] * 4], slot, loss, shapes=shapes
        )
        for slot, loss in enumerate(losses * 4)
    ]
    batch = MicroBatch(chunks[0].chunks[0], shapes)
    assert all(batch.join(request.chunks[0]) for request in chunks[1:])
    assert (batch.blocks, batch.used, len(batch.rows().slots)) == (blocks, 32, 32)
    assert batch.rows().segments.all()


def test_single_rows_take_free_rows_of_any_data_shard():
    shapes = IN_BLOCKS
    first, *others = (packed([supervised(60)], slot, shapes=shapes).chunks[0] for slot in range(8))
    batch = MicroBatch(first, shapes)
    assert all(batch.join(chunk) for chunk in others)
    assert batch.blocks == 1
    assert sorted(batch.rows().slots.tolist()) == list(range(8))


def test_three_data_shards_are_always_the_first():
    shapes = IN_BLOCKS
    single, five = (packed([supervised(60)] * n, n, shapes=shapes).chunks[0] for n in (1, 5))
    batch = MicroBatch(single, shapes)
    assert batch.join(five)
    assert batch.blocks == 1
    assert batch.rows().slots.tolist()[:5] == [5] * 5


def test_rows_fill_one_data_shard_after_the_other():
    (chunk,) = packed([supervised(64, seed) for seed in range(21)], shapes=IN_BLOCKS).chunks
    assert (chunk.used, chunk.size, chunk.blocks) == (21, 8, 3)
    by_shard = MicroBatch(chunk, IN_BLOCKS).rows().tokens.reshape(SHARDS, 3, 2, 64)
    in_order = by_shard.swapaxes(0, 1).reshape(-1, 64)
    np.testing.assert_array_equal(in_order[:16], chunk.rows.tokens[:16])
    np.testing.assert_array_equal(in_order[16:], np.pad(chunk.rows.tokens[16:], ((0, 3), (0, 0))))


def test_free_rows_are_all_zeros():
    (chunk,) = packed([supervised(64)], slot=3).chunks
    batch = MicroBatch(chunk, SHAPES)
    is_free = ~batch.rows().segments.any(axis=1)
    assert is_free.sum() == batch.size - 1
    for arrays in (batch.rows(), batch.loss()):
        for field, values in fields_of(arrays).items():
            assert not values[is_free].any(), field


def test_models_share_a_micro_batch_while_their_rows_find_room():
    half, other_half, one_more = (half_a_batch(slot).chunks[0] for slot in range(3))
    batch = MicroBatch(half, SHORT_ROWS)
    assert not batch.is_full
    assert batch.join(other_half)
    assert batch.is_full
    assert not batch.join(one_more)
    assert sorted(set(batch.rows().slots.tolist())) == [0, 1]


@pytest.mark.parametrize(
    "slot, lengths, forward_only",
    [
        (0, [64], False),  # the same model: its sums must not depend on timing
        (1, [64], True),
        (1, [128], False),
        (1, [64] * 128, False),
    ],
    ids=["same model", "other kind", "other row length", "other block"],
)
def test_what_differs_does_not_share_a_micro_batch(slot, lengths, forward_only):
    batch = MicroBatch(packed([supervised(64)]).chunks[0], SHAPES)
    assert not batch.join(packed([supervised(n) for n in lengths], slot, forward_only=forward_only).chunks[0])


@pytest.mark.parametrize(
    "request_",
    [
        lambda slot: packed([distilled(60, 3)] * 4, slot, shapes=SHORT_ROWS),
        lambda slot: packed([of_sequences(60)] * 4, slot, GSPO, shapes=SHORT_ROWS),
    ],
    ids=["several targets", "sequences"],
)
def test_requests_for_different_programs_do_not_share_a_micro_batch(request_):
    plain = packed([reinforced(60)] * 4, 1, PPO, shapes=SHORT_ROWS).chunks[0]
    special = request_(2).chunks[0]
    assert not MicroBatch(plain, SHORT_ROWS).join(special)
    batch = MicroBatch(special, SHORT_ROWS)
    assert not batch.join(plain)
    assert not batch.join(packed([distilled(60, 5)] * 4, 1, shapes=SHORT_ROWS).chunks[0])
    assert batch.join(request_(1).chunks[0])


def test_each_model_gets_its_own_rows_of_a_shared_reply():
    requests = [half_a_batch(slot) for slot in range(2)]
    batch = MicroBatch(requests[0].chunks[0], SHORT_ROWS)
    assert batch.join(requests[1].chunks[0])
    shared = batch.cut(*run(batch.rows(), batch.loss()))
    for request, output in zip(requests, shared, strict=True):
        together, apart = request.results([output]), request.results(alone(request))
        for ours, theirs in ((together.logprobs, apart.logprobs), (together.losses, apart.losses)):
            assert [array.tobytes() for array in ours] == [array.tobytes() for array in theirs]
        assert together.loss == apart.loss
