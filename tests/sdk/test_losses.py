"""Losses through the real SDK: many targets per position, sequences, and thresholds of single datums."""

from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.sdk.examples import (
    SECONDS,
    VOCABULARY,
    datum,
    gradient_norm,
    logprobs_of,
    random_tokens,
    reinforced,
    supervised,
    train,
)

TOKENS = random_tokens(13, seed=5)
LENGTH = len(TOKENS) - 1
ONES = [1.0] * LENGTH


def output_of(future: Any) -> types.ForwardBackwardOutput:
    return future.result(SECONDS)


def logprobs_in(output: types.ForwardBackwardOutput, index: int = 0) -> np.ndarray:
    return output.loss_fn_outputs[index]["logprobs"].to_numpy()


def several(targets: np.ndarray, weights: np.ndarray) -> types.Datum:
    return datum(TOKENS[:-1], target_tokens=targets, weights=weights.astype(np.float32))


def csr(dense: np.ndarray, dtype: str) -> types.TensorData:
    """What the SDK makes of sparse 2-D tensors of torch: cells of value 0 are not listed."""
    rows, columns = np.nonzero(dense)
    starts = np.searchsorted(rows, np.arange(len(dense) + 1))
    return types.TensorData(
        data=dense[rows, columns].tolist(),
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        shape=list(dense.shape),
        sparse_crow_indices=starts.tolist(),
        sparse_col_indices=columns.tolist(),
    )


def random_targets(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(count)
    targets = np.stack([random.choice(VOCABULARY, count, replace=False) for _ in range(LENGTH)])
    return targets, random.normal(size=targets.shape) * (random.random(targets.shape) < 0.6)


def test_a_datum_without_weights_is_one_with_ones(trainer):
    targets = TOKENS[1:]
    sums, norms = [], []
    for inputs in ({}, {"weights": ONES}):
        data = [datum(TOKENS[:-1], target_tokens=targets, **inputs)]
        sums.append(output_of(trainer.forward_backward(data, "cross_entropy")).metrics["loss:sum"])
        norms.append(gradient_norm(trainer))
    assert sums[0] == sums[1] > 0
    assert norms[0] == norms[1] > 0


def test_several_targets_are_the_sum_of_datums_with_one(trainer):
    targets, weights = random_targets(6)
    output = output_of(trainer.forward_backward([several(targets, weights)], "cross_entropy"))
    together = gradient_norm(trainer)
    single = [
        datum(TOKENS[:-1], target_tokens=t, weights=w.astype(np.float32))
        for t, w in zip(targets.T, weights.T, strict=True)
    ]
    apart = output_of(trainer.forward_backward(single, "cross_entropy"))
    assert gradient_norm(trainer) == pytest.approx(together, rel=1e-4)
    assert output.metrics["loss:sum"] == pytest.approx(apart.metrics["loss:sum"], rel=1e-5)
    columns = np.stack([logprobs_in(apart, index) for index in range(6)], axis=1)
    np.testing.assert_allclose(logprobs_in(output), columns, atol=1e-5)
    of_positions = output.loss_fn_outputs[0]["elementwise_loss"].to_numpy()
    np.testing.assert_allclose(of_positions, -(columns * weights).sum(1), atol=1e-4)


def test_sparse_targets_are_dense_ones_with_zeros(trainer):
    targets, weights = random_targets(5)
    targets[3], targets[:, 4] = 0, 0
    dense = output_of(trainer.forward_backward([several(targets, weights)], "cross_entropy"))
    norm = gradient_norm(trainer)
    sparse = datum(
        TOKENS[:-1], target_tokens=csr(targets, "int64"), weights=csr(weights.astype(np.float32), "float32")
    )
    output = output_of(trainer.forward_backward([sparse], "cross_entropy"))
    assert gradient_norm(trainer) == norm
    assert output.metrics == dense.metrics
    assert logprobs_in(output).shape == (LENGTH, 5)
    np.testing.assert_array_equal(logprobs_in(output), logprobs_in(dense))


def test_top_k_distillation_brings_a_student_to_its_teacher(new_trainer):
    """As recipes do it: the teacher's best tokens, weighed by their probabilities."""
    teacher, student = new_trainer(seed=1), new_trainer(seed=2)
    for _ in range(5):
        train(teacher, [supervised(TOKENS)])
    candidates, _ = random_targets(7)
    candidates[:, 0] = TOKENS[1:]
    ask = several(candidates, np.zeros(candidates.shape))
    of_teacher = np.exp(logprobs_in(output_of(teacher.forward([ask], "cross_entropy"))))
    weights = of_teacher / of_teacher.sum(axis=1, keepdims=True)
    losses = []
    for _ in range(5):
        losses.append(train(student, [several(candidates, weights)]))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]


def of_sequence(logprobs: np.ndarray, advantages: np.ndarray, mask: np.ndarray, **more: Any) -> types.Datum:
    return datum(
        TOKENS[:-1],
        target_tokens=TOKENS[1:],
        logprobs=logprobs.tolist(),
        advantages=advantages.tolist(),
        sequence_ratio_mask=mask.tolist(),
        **more,
    )


def test_gspo_weighs_a_sequence_by_the_mean_of_its_ratios(trainer):
    logprobs = logprobs_of(trainer, [supervised(TOKENS)])
    mask = np.arange(LENGTH) >= 4
    shift = np.where(mask, np.linspace(-0.4, 0.5, LENGTH), 7.0)  # of a prompt, which is in no ratio
    advantages = np.where(mask, np.linspace(0.2, 1.0, LENGTH), 0.0)
    ratio = np.exp(shift[mask].mean())
    wide = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
    data = [of_sequence(logprobs - shift, advantages, mask.astype(float))]
    output = output_of(trainer.forward_backward(data, "gspo", wide))
    norm = gradient_norm(trainer)
    assert output.metrics["loss:sum"] == pytest.approx(-ratio * advantages.sum(), rel=1e-4)
    np.testing.assert_allclose(logprobs_in(output), logprobs, atol=1e-5)
    forward = output_of(trainer.forward(data, "gspo", wide))
    assert forward.metrics["loss:sum"] == pytest.approx(output.metrics["loss:sum"], rel=1e-6)
    assert gradient_norm(trainer) == 0
    trainer.forward_backward([supervised(TOKENS, (ratio * advantages).tolist())], "cross_entropy")
    assert gradient_norm(trainer) == pytest.approx(norm, rel=1e-4)


def test_gspo_clips_by_default_where_its_paper_does(trainer):
    logprobs = logprobs_of(trainer, [supervised(TOKENS)])
    for shift, clips in ((3e-4, False), (5e-4, True)):
        data = [of_sequence(logprobs - shift, np.ones(LENGTH), np.ones(LENGTH))]
        output = output_of(trainer.forward_backward(data, "gspo"))
        assert (gradient_norm(trainer) == 0) == clips
        assert output.metrics["loss:sum"] == pytest.approx(-LENGTH * np.exp(min(shift, 4e-4)), rel=2e-5)


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
def test_thresholds_of_a_datum_are_those_of_the_request(trainer, loss):
    logprobs = logprobs_of(trainer, [supervised(TOKENS)])
    plain = reinforced(TOKENS, (logprobs - 0.5).tolist(), ONES)
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.25}
    expected = output_of(trainer.forward_backward([plain], loss, config)).metrics["loss:sum"]
    norm = gradient_norm(trainer)
    default = output_of(trainer.forward_backward([plain], loss)).metrics["loss:sum"]
    assert default != pytest.approx(expected)
    gradient_norm(trainer)
    for high in ([1.25], [1.25] * LENGTH):
        own = {"clip_low_threshold": [0.5], "clip_high_threshold": high}
        data = [types.Datum(plain.model_input, {**plain.loss_fn_inputs, **own})]
        output = output_of(trainer.forward_backward(data, loss))
        assert output.metrics["loss:sum"] == expected
        assert gradient_norm(trainer) == norm


def test_spans_that_no_loss_needs_may_be_anything(trainer):
    plain = supervised(TOKENS)
    spans = [types.SampledProvenanceSpan(sequence_id="?", length=LENGTH)]
    norms = []
    for data in ([plain], [plain.with_provenance(model_input=spans, loss_fn_inputs=spans)]):
        output_of(trainer.forward_backward(data, "cross_entropy"))
        norms.append(gradient_norm(trainer))
    assert norms[0] == norms[1]


def test_a_word_is_refused_where_a_loss_wants_a_number(trainer):
    plain = reinforced(TOKENS, ONES, ONES)
    future = trainer.forward_backward([plain], "ppo", {"clip_high_threshold": "wide"})
    with pytest.raises(tinker.RequestFailedError, match="clip_high_threshold is 'wide'; it must be a finite"):
        future.result(SECONDS)
