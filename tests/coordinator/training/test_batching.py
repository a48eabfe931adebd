from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_tx.coordinator.training.batching import Chunk, ChunkOutput, MicroBatch, PackedRequest, pack
from spmd_tx.coordinator.training.losses import LossSettings
from spmd_tx.coordinator.training.packing import TrainingShapes
from spmd_tx.coordinator.wire.training_protobuf import Datum
from spmd_tx.protocol.commands import LOSS_NAMES, LossInputs, PackedRows

SHARDS = 4
SHAPES = TrainingShapes(SHARDS, 2048, (256, 2048), max_context=512, attention_share=5e-4)
SHORT_ROWS = TrainingShapes(SHARDS, 128, (256,), max_context=64, attention_share=5e-4)
# of 64 tokens: a micro-batch is one block of 8 rows
IN_BLOCKS = replace(SHORT_ROWS, train_tokens=1024)  # 8 blocks of 8 rows
CROSS_ENTROPY = LossSettings(LOSS_NAMES.index("cross_entropy"))
PPO = LossSettings(LOSS_NAMES.index("ppo"), clip_low=0.8, clip_high=1.2)
GSPO = LossSettings(LOSS_NAMES.index("gspo"), clip_low=0.8, clip_high=1.2)


def supervised(length: int, seed: int = 0, weight: float = 1.0) -> Datum:
    random = np.random.default_rng([length, seed])
    return Datum(
        tokens=random.integers(1, 1000, length, dtype=np.int32),
        loss_inputs={
            "target_tokens": random.integers(1, 1000, length),
            "weights": np.full(length, weight, np.float32),
        },
    )


def reinforced(length: int, seed: int = 0) -> Datum:
    random = np.random.default_rng([length, seed])
    return Datum(
        tokens=random.integers(1, 1000, length, dtype=np.int32),
        loss_inputs={
            "target_tokens": random.integers(1, 1000, length),
            "logprobs": -random.random(length, dtype=np.float32),
            "advantages": random.standard_normal(length, dtype=np.float32),
        },
    )


def distilled(length: int, targets: int, seed: int = 0) -> Datum:
    random = np.random.default_rng([length, targets, seed])
    return Datum(
        tokens=random.integers(1, 1000, length, dtype=np.int32),
        loss_inputs={
            "target_tokens": random.integers(1, 1000, (length, targets)),
            "weights": random.random((length, targets), dtype=np.float32),
        },
    )


def of_sequences(length: int, seed: int = 0) -> Datum:
    datum = reinforced(length, seed)
    return Datum(datum.tokens, datum.loss_inputs | {"sequence_ratio_mask": np.ones(length, np.float32)})


def packed(
    datums: list[Datum],
    slot: int = 0,
    loss: LossSettings = CROSS_ENTROPY,
    forward_only: bool = False,
    shapes: TrainingShapes = SHAPES,
):
    request = pack(datums, loss, forward_only, shapes)
    return replace(request, chunks=[chunk.in_slot(slot) for chunk in request.chunks])


def half_a_batch(slot: int) -> PackedRequest:
    """Four rows of a block of 8."""
    return packed(four(slot), slot, shapes=SHORT_ROWS)


def four(seed: int) -> list[Datum]:
    """Two of them do not fit into one short row."""
    return [supervised(60, 4 * seed + number) for number in range(4)]


def run(rows: PackedRows, loss: LossInputs) -> tuple[np.ndarray, np.ndarray]:
    """Stands in for the model: depends on everything a token may depend on."""
    per_token = rows.tokens * 3 + rows.positions * 11 + rows.slots[:, None]
    several = rows.targets.ndim == 3
    logprobs = -((per_token[..., None] if several else per_token) + rows.targets * 7) / 1000
    losses = -logprobs * loss.weights
    return logprobs.astype(np.float32), (losses.sum(-1) if several else losses).astype(np.float32)


def alone(request: PackedRequest) -> list[ChunkOutput]:
    outputs = []
    for chunk in request.chunks:
        batch = MicroBatch(chunk, SHAPES)
        outputs += batch.cut(*run(batch.rows(), batch.loss()))
    return outputs


@given(st.lists(st.integers(1, 512), min_size=1, max_size=40))
def test_every_token_gets_its_own_result_back(lengths):
    datums = [supervised(length, seed) for seed, length in enumerate(lengths)]
    request = packed(datums, slot=2)
    logprobs, loss = request.results(alone(request))
    expected = [
        -(datum.tokens * 3 + datum.loss_inputs["target_tokens"] * 7 + np.arange(len(datum.tokens)) * 11 + 2)
        / 1000
        for datum in datums
    ]
    for got, want in zip(logprobs, expected, strict=True):
        np.testing.assert_array_equal(got, want.astype(np.float32))
    assert loss == pytest.approx(-sum(array.sum() for array in expected), rel=1e-6)


REQUESTS = st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=40), min_size=2, max_size=8)
SERVERS = [
    TrainingShapes(shards, 1024, blocks, 256, 5e-4, expert_shards)
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
    shapes = TrainingShapes(shards, 4096, (256,), max_context=4096, attention_share=5e-4)
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


def fields_of(arrays: PackedRows | LossInputs) -> dict[str, np.ndarray]:
    """Return the arrays that are not None."""
    fields = {field: getattr(arrays, field) for field in arrays.__struct_fields__}
    return {field: values for field, values in fields.items() if values is not None}


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
        assert [array.tobytes() for array in together[0]] == [array.tobytes() for array in apart[0]]
        assert together[1] == apart[1]


def test_the_loss_is_a_sum_never_a_mean():
    once = packed([supervised(20)])
    twice = packed([supervised(20), supervised(20)])
    doubled = packed([supervised(20, weight=2.0)])
    loss = once.results(alone(once))[1]
    assert twice.results(alone(twice))[1] == pytest.approx(2 * loss)
    assert doubled.results(alone(doubled))[1] == pytest.approx(2 * loss)


def test_a_sampling_logprob_without_advantage_reaches_no_worker():
    datum = reinforced(4)
    datum.loss_inputs["advantages"][:2] = 0
    datum.loss_inputs["logprobs"][:2] = [-np.inf, np.nan]
    (chunk,) = packed([datum], loss=PPO).chunks
    sent = chunk.loss.sampling_logprobs[0, :4]
    np.testing.assert_array_equal(sent, [0, 0, *datum.loss_inputs["logprobs"][2:]])


def test_loss_parameters_stand_on_every_row():
    (chunk,) = packed([reinforced(60), reinforced(60)], loss=PPO).chunks
    assert set(chunk.loss.kinds.tolist()) == {LOSS_NAMES.index("ppo")}
    is_token = chunk.rows.segments > 0
    np.testing.assert_array_equal(chunk.loss.clip_low, np.where(is_token, np.float32(0.8), 0))
    np.testing.assert_array_equal(chunk.loss.clip_high, np.where(is_token, np.float32(1.2), 0))


def test_thresholds_of_a_datum_override_those_of_the_request():
    plain, own, per_token = (reinforced(4, seed) for seed in range(3))
    own.loss_inputs["clip_low_threshold"] = np.array([0.5], np.float32)
    per_token.loss_inputs["clip_high_threshold"] = np.array([1, 2, 3, 4], np.float32)
    (chunk,) = packed([plain, own, per_token], loss=PPO).chunks
    for datum, low, high in ((plain, 0.8, 1.2), (own, 0.5, 1.2), (per_token, 0.8, [1, 2, 3, 4])):
        row, start = np.argwhere(chunk.rows.tokens == datum.tokens[0])[0]
        place = row, slice(start, start + 4)
        np.testing.assert_array_equal(chunk.loss.clip_low[place], np.float32(low))
        np.testing.assert_array_equal(chunk.loss.clip_high[place], np.float32(high))


def test_results_have_the_shape_of_their_targets():
    datum = supervised(5)
    column = Datum(datum.tokens, {key: value[:, None] for key, value in datum.loss_inputs.items()})
    request = packed([datum, column])
    assert [array.shape for array in request.results(alone(request))[0]] == [(5,), (5, 1)]


def test_targets_of_any_number_share_a_request_and_come_back_as_they_were_sent():
    datums = [distilled(5, 3), supervised(6), distilled(7, 1), distilled(8, 5)]
    request = packed(datums, slot=2)
    assert request.chunks[0].rows.targets.shape[2] == 8  # powers of two, so that few programs are compiled
    logprobs, loss = request.results(alone(request))
    total = 0.0
    for datum, got in zip(datums, logprobs, strict=True):
        targets, weights = datum.loss_inputs["target_tokens"], datum.loss_inputs["weights"]
        per_token = datum.tokens * 3 + np.arange(len(datum.tokens)) * 11 + 2
        per_token = per_token.reshape(-1, *[1] * (targets.ndim - 1))
        wanted = (-(per_token + targets * 7) / 1000).astype(np.float32)
        np.testing.assert_array_equal(got, wanted, strict=True)
        total -= float((wanted * weights).sum())
    assert loss == pytest.approx(total, rel=1e-5)


def test_one_target_per_position_is_the_plain_program_however_it_is_written():
    (chunk,) = packed([distilled(5, 1)]).chunks
    assert chunk.rows.targets.ndim == 2
    assert chunk.program == packed([supervised(5)]).chunks[0].program


def test_a_target_that_is_sent_twice_keeps_one_weight():
    datum = distilled(2, 4)
    datum.loss_inputs["target_tokens"][:] = [[7, 9, 7, 7], [0, 3, 0, 4]]
    datum.loss_inputs["weights"][:] = [[1, 2, 4, 0], [0, 1, 0, 2]]
    (chunk,) = packed([datum]).chunks
    np.testing.assert_array_equal(chunk.loss.weights[0, :2], [[5, 2, 0, 0], [0, 1, 0, 2]])


def test_a_sequence_keeps_the_logprobs_that_its_ratio_needs():
    datum = of_sequences(4)
    datum.loss_inputs["advantages"][:3] = 0
    datum.loss_inputs["sequence_ratio_mask"][:2] = 0
    datum.loss_inputs["logprobs"][:2] = [-np.inf, np.nan]
    (chunk,) = packed([datum], loss=GSPO).chunks
    sent = chunk.loss.sampling_logprobs[0, :4]
    np.testing.assert_array_equal(sent, [0, 0, *datum.loss_inputs["logprobs"][2:]])
    np.testing.assert_array_equal(chunk.loss.ratio_mask[0, :5], [0, 0, 1, 1, 0])


def test_a_long_request_becomes_several_chunks_and_comes_back_whole():
    datums = [supervised(300, seed) for seed in range(40)]
    request = packed(datums)
    assert len(request.chunks) > 1
    assert [len(array) for array in request.results(alone(request))[0]] == [300] * 40


def test_arrays_are_what_the_workers_expect():
    (chunk,) = packed([reinforced(60)], loss=PPO).chunks
    assert {values.dtype for values in fields_of(chunk.rows).values()} == {np.dtype("int32")}
    assert chunk.loss.kinds.dtype == np.int32
    dtypes = {field: values.dtype for field, values in fields_of(chunk.loss).items() if field != "kinds"}
    assert set(dtypes.values()) == {np.dtype("float32")}


def test_experts_lie_where_their_tokens_lie_and_the_router_chooses_elsewhere():
    datums = four(0)
    known: list[np.ndarray | None] = [None] * len(datums)
    for index in (0, 3):
        known[index] = np.tile(datums[index].tokens[:, None, None], (1, 3, 2)).astype(np.int16)
    (with_experts,) = pack(datums, CROSS_ENTROPY, False, SHORT_ROWS, known).chunks
    (without,) = half_a_batch(1).chunks
    batch = MicroBatch(without, SHORT_ROWS)
    assert batch.join(with_experts)
    rows = batch.rows()
    assert rows.experts is not None
    wanted = np.full((*rows.tokens.shape, 3, 2), -1, np.int16)
    for index in (0, 3):
        tokens = datums[index].tokens
        (row,) = np.flatnonzero((rows.tokens[:, : len(tokens)] == tokens).all(axis=1))
        wanted[row, : len(tokens)] = tokens[:, None, None]
    np.testing.assert_array_equal(rows.experts, wanted, strict=True)


def test_without_any_experts_none_are_sent():
    (chunk,) = packed([supervised(64)]).chunks
    assert MicroBatch(chunk, SHAPES).rows().experts is None
