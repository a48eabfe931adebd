from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_tx.coordinator.training.batching import ChunkOutput, MicroBatch, PackedRequest, pack
from spmd_tx.coordinator.training.losses import LossSettings
from spmd_tx.coordinator.training.packing import TrainingShapes
from spmd_tx.coordinator.wire.training_protobuf import Datum
from spmd_tx.protocol.commands import LOSS_NAMES, LossInputs, PackedRows

SHARDS = 4
SHAPES = TrainingShapes(data_shards=SHARDS, train_tokens=2048, max_context=512, attention_share=5e-4)
SHORT_ROWS = replace(SHAPES, max_context=64)  # all of 64 tokens, in micro-batches of 4, 32 or 128
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
    """Sixteen rows of a micro-batch of 32."""
    return packed(sixteen(slot), slot, shapes=SHORT_ROWS)


def sixteen(seed: int) -> list[Datum]:
    """Two of them do not fit into one short row."""
    return [supervised(60, 16 * seed + number) for number in range(16)]


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
        batch = MicroBatch(chunk, SHARDS)
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


@given(st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=12), min_size=2, max_size=5))
def test_company_changes_no_byte_of_a_chunk_and_no_place_in_its_shard(requests_lengths):
    chunks = [
        chunk
        for slot, lengths in enumerate(requests_lengths)
        for chunk in packed([reinforced(length, slot) for length in lengths], slot, PPO).chunks
    ]
    company = MicroBatch(chunks[0], SHARDS)
    for chunk in chunks[1:]:
        company.join(chunk)
    together, rows, loss = rows_by_slot(company), company.rows(), company.loss()
    for chunk in company.chunks:
        solo = MicroBatch(chunk, SHARDS)
        apart = rows_by_slot(solo)[chunk.slot]
        for shard in range(SHARDS):
            assert len(together[chunk.slot][shard]) == len(apart[shard])
            for here, there in zip(together[chunk.slot][shard], apart[shard], strict=True):
                assert row_bytes(rows, loss, here) == row_bytes(solo.rows(), solo.loss(), there)


def rows_by_slot(batch: MicroBatch) -> dict[int, list[list[int]]]:
    """Return the rows of the command, in order, by slot and data shard."""
    rows = batch.rows()
    places = len(rows.slots) // SHARDS
    found: dict[int, list[list[int]]] = {chunk.slot: [[] for _ in range(SHARDS)] for chunk in batch.chunks}
    for row in np.flatnonzero(rows.segments.any(axis=1)).tolist():
        found[int(rows.slots[row])][row // places].append(row)
    return found


def row_bytes(rows: PackedRows, loss: LossInputs, row: int) -> list[bytes]:
    return [values[row].tobytes() for arrays in (rows, loss) for values in fields_of(arrays).values()]


def fields_of(arrays: PackedRows | LossInputs) -> dict[str, np.ndarray]:
    """Return the arrays that are not None."""
    fields = {field: getattr(arrays, field) for field in arrays.__struct_fields__}
    return {field: values for field, values in fields.items() if values is not None}


def test_rows_are_dealt_to_the_data_shards_in_turn():
    (chunk,) = packed([supervised(64, seed) for seed in range(20)], shapes=SHORT_ROWS).chunks
    assert (chunk.used, chunk.size) == (20, 32)
    batch = MicroBatch(chunk, SHARDS)
    places = chunk.size // SHARDS
    rows = batch.rows()
    for row in range(chunk.used):
        destination = (row % SHARDS) * places + row // SHARDS
        np.testing.assert_array_equal(rows.tokens[destination], chunk.rows.tokens[row])


def test_free_rows_are_all_zeros():
    (chunk,) = packed([supervised(64)], slot=3).chunks
    batch = MicroBatch(chunk, SHARDS)
    for arrays in (batch.rows(), batch.loss()):
        for field, values in fields_of(arrays).items():
            assert not values[1:].any(), field


def test_models_share_a_micro_batch_while_their_rows_find_room():
    half, other_half, one_more = (half_a_batch(slot).chunks[0] for slot in range(3))
    batch = MicroBatch(half, SHARDS)
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
        (1, [64] * 16, False),
    ],
    ids=["same model", "other kind", "other row length", "other size"],
)
def test_what_differs_does_not_share_a_micro_batch(slot, lengths, forward_only):
    batch = MicroBatch(packed([supervised(64)]).chunks[0], SHARDS)
    assert not batch.join(packed([supervised(n) for n in lengths], slot, forward_only=forward_only).chunks[0])


@pytest.mark.parametrize(
    "request_",
    [
        lambda slot: packed([distilled(60, 3)] * 16, slot, shapes=SHORT_ROWS),
        lambda slot: packed([of_sequences(60)] * 16, slot, GSPO, shapes=SHORT_ROWS),
    ],
    ids=["several targets", "sequences"],
)
def test_requests_for_different_programs_do_not_share_a_micro_batch(request_):
    plain = packed([reinforced(60)] * 16, 1, PPO, shapes=SHORT_ROWS).chunks[0]
    special = request_(2).chunks[0]
    assert not MicroBatch(plain, SHARDS).join(special)
    batch = MicroBatch(special, SHARDS)
    assert not batch.join(plain)
    assert not batch.join(packed([distilled(60, 5)] * 16, 1, shapes=SHORT_ROWS).chunks[0])
    assert batch.join(request_(1).chunks[0])


def test_each_model_gets_its_own_rows_of_a_shared_reply():
    requests = [half_a_batch(slot) for slot in range(2)]
    batch = MicroBatch(requests[0].chunks[0], SHARDS)
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
    datums = [supervised(300, seed) for seed in range(20)]
    request = packed(datums)
    assert len(request.chunks) > 1
    assert [len(array) for array in request.results(alone(request))[0]] == [300] * 20


def test_arrays_are_what_the_workers_expect():
    (chunk,) = packed([reinforced(60)], loss=PPO).chunks
    assert {values.dtype for values in fields_of(chunk.rows).values()} == {np.dtype("int32")}
    assert chunk.loss.kinds.dtype == np.int32
    dtypes = {field: values.dtype for field, values in fields_of(chunk.loss).items() if field != "kinds"}
    assert set(dtypes.values()) == {np.dtype("float32")}


def test_experts_lie_where_their_tokens_lie_and_the_router_chooses_elsewhere():
    datums = sixteen(0)
    known: list[np.ndarray | None] = [None] * len(datums)
    for index in (0, 5):
        known[index] = np.tile(datums[index].tokens[:, None, None], (1, 3, 2)).astype(np.int16)
    (with_experts,) = pack(datums, CROSS_ENTROPY, False, SHORT_ROWS, known).chunks
    (without,) = half_a_batch(1).chunks
    batch = MicroBatch(without, SHARDS)
    assert batch.join(with_experts)
    rows = batch.rows()
    assert rows.experts is not None
    wanted = np.full((*rows.tokens.shape, 3, 2), -1, np.int16)
    for index in (0, 5):
        tokens = datums[index].tokens
        (row,) = np.flatnonzero((rows.tokens[:, : len(tokens)] == tokens).all(axis=1))
        wanted[row, : len(tokens)] = tokens[:, None, None]
    np.testing.assert_array_equal(rows.experts, wanted, strict=True)


def test_without_any_experts_none_are_sent():
    (chunk,) = packed([supervised(64)]).chunks
    assert MicroBatch(chunk, SHARDS).rows().experts is None
