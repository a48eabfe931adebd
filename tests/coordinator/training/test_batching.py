import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_tx.coordinator.training.batching import pack
from spmd_tx.coordinator.training.micro_batch import MicroBatch
from spmd_tx.coordinator.wire.training_protobuf import Datum
from spmd_tx.protocol.commands import LOSS_NAMES
from tests.coordinator.training.packed_requests import (
    CROSS_ENTROPY,
    GSPO,
    PPO,
    SHAPES,
    SHORT_ROWS,
    alone,
    distilled,
    fields_of,
    four,
    half_a_batch,
    of_sequences,
    packed,
    reinforced,
    supervised,
)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=40))
def test_every_token_gets_its_own_result_back(lengths):
    datums = [supervised(length, seed) for seed, length in enumerate(lengths)]
    request = packed(datums, slot=2)
    logprobs, _, loss = request.results(alone(request))
    expected = [
        -(datum.tokens * 3 + datum.loss_inputs["target_tokens"] * 7 + np.arange(len(datum.tokens)) * 11 + 2)
        / 1000
        for datum in datums
    ]
    for got, want in zip(logprobs, expected, strict=True):
        np.testing.assert_array_equal(got, want.astype(np.float32))
    assert loss == pytest.approx(-sum(array.sum() for array in expected), rel=1e-6)


def test_the_loss_is_a_sum_never_a_mean():
    once = packed([supervised(20)])
    twice = packed([supervised(20), supervised(20)])
    doubled = packed([supervised(20, weight=2.0)])
    loss = once.results(alone(once)).loss
    assert twice.results(alone(twice)).loss == pytest.approx(2 * loss)
    assert doubled.results(alone(doubled)).loss == pytest.approx(2 * loss)


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
    assert [array.shape for array in request.results(alone(request)).logprobs] == [(5,), (5, 1)]


def test_targets_of_any_number_share_a_request_and_come_back_as_they_were_sent():
    datums = [distilled(5, 3), supervised(6), distilled(7, 1), distilled(8, 5)]
    request = packed(datums, slot=2)
    assert request.chunks[0].rows.targets.shape[2] == 8  # powers of two, so that few programs are compiled
    logprobs, losses, loss = request.results(alone(request))
    total = 0.0
    for datum, got, lost in zip(datums, logprobs, losses, strict=True):
        targets, weights = datum.loss_inputs["target_tokens"], datum.loss_inputs["weights"]
        per_token = datum.tokens * 3 + np.arange(len(datum.tokens)) * 11 + 2
        per_token = per_token.reshape(-1, *[1] * (targets.ndim - 1))
        wanted = (-(per_token + targets * 7) / 1000).astype(np.float32)
        np.testing.assert_array_equal(got, wanted, strict=True)
        of_positions = -(wanted * weights).reshape(len(wanted), -1).sum(-1)
        np.testing.assert_allclose(lost, of_positions, rtol=1e-5)
        total += float(of_positions.sum())
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
    assert [len(array) for array in request.results(alone(request)).logprobs] == [300] * 40


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
