import numpy as np
import pytest

from spmd_tx.coordinator.training.loss_metrics import loss_metrics
from spmd_tx.coordinator.training.losses import LossSettings
from spmd_tx.protocol.commands import LOSS_NAMES
from tests.coordinator.training.packed_requests import GSPO, PPO, of_sequences, packed, reinforced, supervised

IMPORTANCE_SAMPLING = LossSettings(LOSS_NAMES.index("importance_sampling"))


def batch(make=reinforced):
    """Datums in which some tokens do not count, and the log-probabilities that they have now."""
    random = np.random.default_rng(0)
    datums = [make(length, seed) for seed, length in enumerate([30, 7, 400, 61])]
    for datum in datums:
        datum.loss_inputs["advantages"][::3] = 0
        datum.loss_inputs["logprobs"][::3] = -np.inf
    sampled = [datum.loss_inputs["logprobs"] for datum in datums]
    return datums, [(old + random.normal(0, 0.3, len(old))).astype(np.float32) for old in sampled]


def counting(datums, logprobs):
    """float64 log p and log q of the tokens that count."""
    counts = [datum.loss_inputs["advantages"] != 0 for datum in datums]
    now = np.concatenate([each[its] for each, its in zip(logprobs, counts, strict=True)])
    then = np.concatenate([d.loss_inputs["logprobs"][its] for d, its in zip(datums, counts, strict=True)])
    return now.astype(np.float64), then.astype(np.float64)


def means_of(datums):
    """The mean advantage of each datum's tokens that count."""
    values = [datum.loss_inputs["advantages"].astype(np.float64) for datum in datums]
    return [each[each != 0].mean() for each in values]


def test_entropy_and_divergence_are_means_over_the_tokens_that_count():
    datums, logprobs = batch()
    metrics = loss_metrics(packed(datums, loss=IMPORTANCE_SAMPLING), logprobs)
    now, then = counting(datums, logprobs)
    ratio = np.exp(now - then)
    assert metrics == pytest.approx(
        {
            "abs_advantage:mean": np.mean([abs(each) for each in means_of(datums)]),
            "entropy:mean": -now.mean(),
            "kl:mean": (ratio - 1 - np.log(ratio)).mean(),
        },
        rel=1e-6,
    )
    assert metrics["kl:mean"] > 0


def test_of_ppo_it_tells_which_ratios_are_beyond_the_thresholds():
    datums, logprobs = batch()
    datums[1].loss_inputs["clip_high_threshold"] = np.array([1e9], np.float32)  # of its own
    metrics = loss_metrics(packed(datums, loss=PPO), logprobs)
    low, high = np.float32(0.8), np.float32(1.2)
    beyond = []
    for datum, now in zip(datums, logprobs, strict=True):
        counts = datum.loss_inputs["advantages"] != 0
        ratio = np.exp(now[counts] - datum.loss_inputs["logprobs"][counts])
        beyond += ((ratio < low) | (ratio > (1e9 if datum is datums[1] else high))).tolist()
    assert 0 < np.mean(beyond) < 1
    assert metrics["clip_fraction:mean"] == pytest.approx(np.mean(beyond))


def test_of_gspo_it_is_the_ratio_of_the_sequence():
    datums, logprobs = batch(of_sequences)
    beyond = []
    for number, (datum, now) in enumerate(zip(datums, logprobs, strict=True)):
        is_in_ratio = np.isfinite(datum.loss_inputs["logprobs"])
        now[is_in_ratio] = datum.loss_inputs["logprobs"][is_in_ratio] + (0.5 if number == 2 else 0.1)
        datum.loss_inputs["sequence_ratio_mask"][:] = is_in_ratio
        beyond += [number == 2] * int((datum.loss_inputs["advantages"] != 0).sum())
    metrics = loss_metrics(packed(datums, loss=GSPO), logprobs)
    assert metrics["clip_fraction:mean"] == pytest.approx(np.mean(beyond))


def test_a_datum_without_advantages_lowers_the_mean():
    datums, logprobs = batch()
    datums[0].loss_inputs["advantages"][:] = 0
    metrics = loss_metrics(packed(datums, loss=PPO), logprobs)
    assert metrics["abs_advantage:mean"] == pytest.approx(np.abs(means_of(datums[1:])).sum() / 4)


def test_without_a_token_that_counts_and_for_cross_entropy_there_are_none():
    datums, logprobs = batch()
    for datum in datums:
        datum.loss_inputs["advantages"][:] = 0
    assert loss_metrics(packed(datums, loss=PPO), logprobs) == {"abs_advantage:mean": 0.0}
    assert loss_metrics(packed([supervised(5)]), [np.zeros(5, np.float32)]) == {}


def test_numbers_that_overflow_are_infinite():
    datums, logprobs = batch()
    logprobs[0][1] = 2000.0
    assert loss_metrics(packed(datums, loss=PPO), logprobs)["kl:mean"] == float("inf")
