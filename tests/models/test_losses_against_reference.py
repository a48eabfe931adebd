"""Losses with several targets, of sequences and with penalties, against an independent implementation."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest

from tests.models.reference_results import (
    TOLERANCE,
    assert_close,
    ignored,
    near_the_sampler,
    random_parameters,
    reference_datum,
    reference_sequence,
    reference_targets,
)
from tests.support.tiny_engine import (
    Datum,
    Row,
    engine_name,
    named_factors,
    random_datum,
    several_targets,
    slot_of,
    tiny_engine,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

MESHES = [
    pytest.param(((1, 1, 1), "dense", False), marks=pytest.mark.slow),
    ((2, 2, 2), "dense", False),
]
TRAINED = (0, 1)


@dataclass(frozen=True)
class Batch:
    """Rows, and who knows what their losses are."""

    rows: list[Row]
    of_datum: Callable[[str, Datum], tuple[Any, Any, Any]]

    @functools.cached_property
    def expected(self):
        return [(datum, *self.of_datum("dense", datum)) for row in self.rows for datum in row]

    def cut(self, output: np.ndarray) -> list[np.ndarray]:
        """Each datum's part of an output, in order."""
        ends = [np.cumsum([len(datum.tokens) for datum in row]) for row in self.rows]
        return [part for line, end in zip(output, ends, strict=False) for part in np.split(line, end)[:-1]]


def targets_batch() -> Batch:
    lengths = [(0, (40, 24)), (1, (64,)), (0, (24,)), (1, (24, 24))]
    rows = [
        tuple(several_targets(random_datum(10 * row + n, slot, n), 4, seed=row) for n in lengths_)
        for row, (slot, lengths_) in enumerate(lengths)
    ]
    return Batch(rows, reference_targets)


def sequence(seed: int, slot: int, length: int, masked: int, clip: tuple[float, float]) -> Datum:
    """Positions before ``masked`` are a prompt's; the next four are in the ratio, but have no advantage."""
    datum = near_the_sampler("dense", random_datum(seed, slot, length, "gspo"), seed)
    datum = ignored(datum, slice(0, masked))
    advantages = datum.advantages.copy()
    advantages[masked : masked + 4] = 0
    mask = (np.arange(length) >= masked).astype(np.float32)
    return replace(datum, advantages=advantages, ratio_mask=mask, clip=clip)


def sequences_batch() -> Batch:
    rows = [
        (sequence(1, 0, 40, 5, (0.5, 2.0)), sequence(2, 0, 24, 3, (1.15, 2.0))),
        (sequence(3, 1, 64, 9, (0.5, 0.9)),),
        (),
        (sequence(4, 1, 24, 24, (0.9, 1.1)), sequence(5, 1, 24, 0, (0.5, 2.0))),
        (sequence(6, 0, 64, 2, (0.5, 2.0)),),
    ]
    return Batch(rows, reference_sequence)


def thresholds_per_token() -> Batch:
    random = np.random.default_rng(1)
    rows = []
    for row, loss in enumerate(("ppo", "cispo")):
        datum = ignored(near_the_sampler("dense", random_datum(row, row, 64, loss), row), slice(5, 13))
        low, width = random.uniform(0.7, 1.1, 64), random.uniform(0.0, 0.6, 64)
        rows.append((replace(datum, clip=(low.astype(np.float32), (low + width).astype(np.float32))),))

    def of_datum(kind: str, datum: Datum):
        counts = datum.advantages != 0
        low, high = datum.clip
        return reference_datum(kind, replace(datum, clip=(low[counts], high[counts])))

    return Batch(rows, of_datum)


def stable_batch() -> Batch:
    rows = []
    for row, (kl_coeff, beta) in enumerate([(0.0, 0.0), (0.3, 0.0), (0.0, 0.3), (0.2, 0.1)]):
        datum = near_the_sampler("dense", random_datum(row, row % 2, 64, "stable_reinforce"), row)
        datum = replace(datum, clip=(0.0, 1.2), kl_coeff=kl_coeff, beta=beta)
        rows.append((ignored(datum, slice(5, 13)),))
    return Batch(rows, reference_datum)


BATCHES = {
    "targets": targets_batch,
    "sequences": sequences_batch,
    "thresholds": thresholds_per_token,
    "stable": stable_batch,
}


@functools.cache
def batch_named(name: str) -> Batch:
    return BATCHES[name]()


@pytest.fixture(scope="module", params=BATCHES)
def batch(request):
    return batch_named(request.param)


@pytest.fixture(scope="module", params=MESHES, ids=engine_name)
def engine(request):
    shape, kind, split_base = request.param
    return tiny_engine(shape, kind=kind, split_base=split_base)


@pytest.fixture(scope="module")
def result(engine, batch):
    return engine.forward_backward(random_parameters("dense")[1], batch.rows)


def test_logprobs_equal_the_reference(batch, result):
    for actual, (datum, _, logprobs, _) in zip(batch.cut(result.logprobs), batch.expected, strict=True):
        assert_close(actual, logprobs, f"logprobs of the {datum.loss} datum of slot {datum.slot}")


def test_losses_equal_the_reference(batch, result):
    for actual, (datum, losses, _, _) in zip(batch.cut(result.losses), batch.expected, strict=True):
        if np.any(datum.advantages):
            assert_close(actual, losses, f"{datum.loss} of slot {datum.slot}")
        else:
            assert not np.any(actual)


def test_gradients_equal_the_reference(batch, result):
    for slot in TRAINED:
        of_slot = [gradient for datum, _, _, gradient in batch.expected if datum.slot == slot]
        total = named_factors(jax.tree.map(lambda *parts: np.sum(parts, axis=0), *of_slot))
        for name, actual in named_factors(slot_of(result.grad_sum, slot)).items():
            assert_close(actual, total[name], f"slot {slot} {name}")


def test_forward_equals_forward_backward(engine, batch, result):
    logprobs, losses = engine.forward(random_parameters("dense")[1], batch.rows)
    np.testing.assert_allclose(logprobs, result.logprobs, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(losses, result.losses, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_batches_have_ratios_on_both_sides_of_their_limits():
    sides = set()
    for datum, _, logprobs, _ in batch_named("sequences").expected:
        if datum.ratio_mask.any():
            inside = datum.ratio_mask != 0
            ratio = np.exp(np.mean((logprobs - datum.sampling_logprobs)[inside]))
            sides.add(int(np.searchsorted(datum.clip, ratio)))
    assert sides == {0, 1, 2}
    for datum, _, logprobs, _ in batch_named("stable").expected:
        ratios = np.exp((logprobs - datum.sampling_logprobs)[datum.advantages != 0])
        assert ratios.min() < datum.clip[1] < ratios.max()
